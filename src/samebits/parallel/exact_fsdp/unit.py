"""A unit of a sharded model: the parameters that are gathered together, and their gradients.

One rank owns each parameter. It is never split: torch's fused SGD rounds the last values of a tensor, which do not fill
a vector, differently from the rest, so an update has the same bits at any world size only if each tensor is updated as
a whole. The parameters of a unit with the same owner lie in one flat tensor, so that a rank sends one message to each
other rank. On ranks that do not own them, the memory of that tensor is freed and taken again, and what autograd has
saved keeps pointing to it:

    forward     gather | compute | free
    backward    gather | compute | free | send the micro-batch's gradients to the owners

The owner adds the gradients of all ranks in the order of the micro-batches, in the binary tree of `parallel/tree.py`.
"""

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.parallel.bucket import Layout, second_gradient
from samebits.parallel.exchange.part import GATHER, REDUCE, Message, bucket_tag
from samebits.parallel.exchange.tree_all_reduce import Work, post
from samebits.parallel.tree import Node, push


def assign_owners(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign tensors to ranks, so that the ranks own about equally many values; return the owner of each tensor.

    Largest tensors first, each to the rank with the fewest values so far; the lowest such rank, so that all ranks
    compute the same. No rank owns more than an even share and one largest tensor.
    """
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(num_ranks)]  # a heap
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], owner))
        owners[index] = owner
    return owners


class Piece:
    """The parameters of a unit that one rank owns. Their memory becomes that of one flat tensor."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        layout = Layout(parameters)
        self.values = layout.allocate()  #: (length,) the flat tensor.
        for index, parameter in enumerate(parameters):
            view = layout.view(self.values, index)
            view.copy_(parameter.detach())
            layout.zero_gap(self.values, index)
            # Through `data`: the Parameter object stays, with its hooks and what refers to it.
            parameter.data = view
        self._num_bytes = self.values.untyped_storage().nbytes()
        #: The parameters that require a gradient.
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.gradients = Layout(self.trained)  #: The layout of their gradients.
        #: (gradients.length,) the current micro-batch's gradients; None before the first one.
        self.leaf: Tensor | None = None

    def allocate(self) -> None:
        """Take memory for the parameters. Their values are undefined."""
        self.values.untyped_storage().resize_(self._num_bytes)

    def free(self) -> None:
        """Free the parameters' memory. They must not be read until it is taken again."""
        self.values.untyped_storage().resize_(0)

    def put(self, index: int, gradient: Tensor | None, factor: float) -> None:
        """Copy a gradient, of any shape, of the parameter `trained[index]`, times a power of two; None: zeros."""
        if self.leaf is None:
            self.leaf = self.gradients.allocate()
        view = self.gradients.view(self.leaf, index)
        if gradient is None:
            view.zero_()
        elif factor != 1.0:
            torch.mul(gradient, factor, out=view)
        else:
            view.copy_(gradient)
        self.gradients.zero_gap(self.leaf, index)

    def take_leaf(self) -> Tensor:
        """Return the leaf, (length,), which is complete, and forget it."""
        assert self.leaf is not None
        leaf = self.leaf
        self.leaf = None
        return leaf


class ShardUnit:
    """Parameters that are gathered together."""

    def __init__(
        self, number: int, parameters: Sequence[nn.Parameter], owners: Sequence[int], world: World
    ) -> None:
        self._world = world
        self._tag = bucket_tag(number)
        #: The parameters of each rank that owns some.
        self.pieces = {
            rank: Piece(
                [each for each, owner in zip(parameters, owners, strict=True) if owner == rank]
            )
            for rank in sorted(set(owners))
        }
        self._places = {
            parameter: (piece, index)
            for piece in self.pieces.values()
            for index, parameter in enumerate(piece.trained)
        }
        #: The trained parameters whose gradient the current backward pass has not reached.
        self.missing: set[nn.Parameter] = set()
        #: Whether no parameter is read after all gradients of the unit are there.
        self.can_free_early = all(parameter.requires_grad for parameter in parameters)
        self._is_gathered = True
        self._gathering: Sequence[Work] = []
        self._reducing: Sequence[Work] = []
        self._sending: list[Tensor] = []  # memory of messages under way
        self._arriving: list[tuple[int, Tensor]] = []
        self._sums: list[tuple[Node, Tensor]] = []

    def start_gather(self) -> None:
        """Start to send what this rank owns to all ranks, and to receive the rest."""
        if self._is_gathered:
            return
        self._is_gathered = True
        messages = []
        for rank, piece in self.pieces.items():
            if rank == self._world.rank:
                messages += [
                    Message(piece.values, peer, self._tag + GATHER, is_receive=False)
                    for peer in self._peers()
                ]
            else:
                piece.allocate()
                messages.append(Message(piece.values, rank, self._tag + GATHER, is_receive=True))
        self._gathering = self._post(messages)

    def gather(self) -> None:
        """Gather the parameters, if they are not there."""
        self.start_gather()
        self._gathering = _wait(self._gathering)

    def free(self) -> None:
        """Free the parameters that other ranks own."""
        if not self._is_gathered:
            return
        self._gathering = _wait(self._gathering)
        self._is_gathered = False
        for rank, piece in self.pieces.items():
            if rank != self._world.rank:
                piece.free()

    def start_step(self) -> None:
        """Drop the last step's sums."""
        self._sums = []

    def start_pass(self) -> None:
        """Expect the gradients of a micro-batch."""
        self.missing = set(self._places)

    def take(self, parameter: nn.Parameter, factor: float) -> None:
        """Move a parameter's gradient into this micro-batch's leaf, times a power of two, or times 0: drop it.

        Raises:
            RuntimeError: The leaf already has this gradient.
        """
        if parameter not in self.missing:
            raise second_gradient(parameter)
        self.missing.remove(parameter)
        piece, index = self._places[parameter]
        if factor:
            piece.put(index, parameter.grad, factor)
        parameter.grad = None

    def start_reduce(self, leaves: Sequence[int | None]) -> None:
        """Start to send the micro-batch's gradients to their owners, and receive own ones; a leaf None has weight 0."""
        me = self._world.rank
        messages = []
        mine = self.pieces.get(me)
        if leaves[me] is not None:
            # The leaf's memory has undefined values, so a gradient that does not exist has to be written as zero.
            for parameter in self.missing:
                piece, index = self._places[parameter]
                piece.put(index, None, 1.0)
        self.missing = set()
        for rank, piece in self.pieces.items():
            leaf = leaves[me]
            if leaf is None or not piece.trained:
                continue
            values = piece.take_leaf()
            if rank == me:
                self._arriving.append((leaf, values))
            else:
                self._sending.append(values)
                messages.append(Message(values, rank, self._tag + REDUCE, is_receive=False))
        if mine is not None and mine.trained:
            for peer in self._peers():
                leaf = leaves[peer]
                if leaf is not None:
                    values = mine.gradients.allocate()
                    self._arriving.append((leaf, values))
                    messages.append(Message(values, peer, self._tag + REDUCE, is_receive=True))
        self._reducing = self._post(messages)

    def finish_reduce(self, num_leaves: int) -> None:
        """Wait for the gradients, and add those that this rank owns."""
        self._reducing = _wait(self._reducing)
        # In the order of the micro-batches, whatever the order in which messages have arrived.
        for leaf, values in sorted(self._arriving, key=lambda entry: entry[0]):
            push(self._sums, (leaf, leaf + 1), values, num_leaves, Tensor.add_)
        self._sending = []
        self._arriving = []

    def owned_gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the step's gradient, of any shape, of each trained parameter that this rank owns."""
        mine = self.pieces.get(self._world.rank)
        if mine is None or not mine.trained:
            return {}
        ((_, total),) = self._sums
        return {
            parameter: mine.gradients.view(total, index)
            for index, parameter in enumerate(mine.trained)
        }

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbor, so that not all send to rank 0 first.
        return [
            (self._world.rank + distance) % self._world.size
            for distance in range(1, self._world.size)
        ]

    def _post(self, messages: list[Message]) -> Sequence[Work]:
        # receives first, as in `TreeAllReduce`
        messages.sort(key=lambda message: not message.is_receive)
        return post(self._world, messages) if messages else []


def _wait(works: Sequence[Work]) -> list[Work]:
    """Wait for messages, and return an empty list."""
    for work in works:
        work.wait()
    return []
