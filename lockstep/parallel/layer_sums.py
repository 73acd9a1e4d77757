"""Where the micro-batches of a step, of all ranks, meet inside the model and add something up in tree order.

Gradients are needed once a step; batch norm's sums are needed in the middle of a pass, which can't go on without them.
So the micro-batches of a process run in turn from one meeting to the next, and at each the process exchanges one
message with every other one that has micro-batches: a single round, with the ears open before the others speak, as
latency is what it costs. Measured on gloo over loopback, two processes, 1 KB: 117 us; with ears opened at the meeting
itself 267 us; gloo's all-gather 326 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.cluster.world import World
from lockstep.data.keyed import key, seed_host
from lockstep.data.order import MicroBatch
from lockstep.errors import TrainError
from lockstep.parallel.coroutines import Coroutines
from lockstep.parallel.tree import Node, push

T = TypeVar("T")
TAG = 1 << 30  # far from those of gradients
# (0 for a forward or 2 for a backward pass, how many sums came before) by the micro-batch's index
Suspects = dict[int, tuple[int, int]]
# Where a micro-batch is that has passed through the model, and where a rank is whose own micro-batches differ.
END, DIVERGED = -1.0, -2.0
NOWHERE = {END: "its end", DIVERGED: "several places at once"}


class _Contribution(NamedTuple):
    place: float
    values: Tensor


class LayerSums:
    """The sums that a step's micro-batches wait for.

    Args:
        world: The ranks.
        device: Where the sums are needed.
        places: Names of all places at which micro-batches can meet.
        max_values: The most numbers that a micro-batch brings to one.
        turns: Runs the process's micro-batches.

    Attributes:
        is_open: Whether a step's micro-batches run now.
    """

    def __init__(
        self, world: World, device: torch.device, places: Sequence[str], max_values: int, turns: Coroutines
    ) -> None:
        self._world, self._device, self._places, self._turns = world, device, places, turns
        self._max_values = max_values
        self._nodes: list[list[Node]] = []
        self._num_leaves = 0
        self._leaves: list[int] = []
        # gloo sends no CUDA tensors, and takes a message that is shorter than the room for it; others may not.
        self._by_host = world.backend == "gloo"
        self._rooms: dict[int, Tensor] = {}
        self._ears: list[dist.Work] = []
        self._suspects: Suspects | None = None
        self._num_sums = 0
        self._here = threading.local()
        self.is_open = False

    def __deepcopy__(self, memo: object) -> LayerSums:
        """A copy of a model meets where the model does."""
        return self

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        nodes: list[list[Node]],
        body: Callable[[MicroBatch], T],
        suspects: Suspects | None = None,
    ) -> list[T]:
        """Call `body(micro_batch)` for each micro-batch of this process; inside, `sum` can be called.

        Args:
            micro_batches: This process's, of one step.
            nodes: For each rank, the nodes of the tree that it holds.
            body: Runs a micro-batch.
            suspects: Gets the micro-batches that brought something not finite, with where they first did.

        Returns:
            What each call gave.

        Raises:
            TrainError: Two micro-batches did not come to the same places.
        """
        if not micro_batches:
            return []
        self._nodes, self._leaves = nodes, [micro_batch.index for micro_batch in micro_batches]
        self._num_leaves = max(last for held in nodes for _, last in held)
        self.is_open, self._suspects, self._num_sums = True, suspects, 0
        try:
            self._listen()
            results = self._turns.run([self._call(body, one) for one in micro_batches], self._settle)
            # Another rank might still wait somewhere, so nobody goes on before all have come to the end.
            if self._peers():
                self._exchange(END, [])
            return results
        finally:
            self.is_open = False

    def sum(self, place: int, values: Tensor) -> Tensor:
        """The sum over all micro-batches of the step.

        Args:
            place: Where the caller is, an index of `places`.
            values: (n,) float64, what its micro-batch brings.

        Returns:
            (n,) float64, the same for all.
        """
        total: Tensor = self._turns.wait(_Contribution(float(place), values))
        # Other micro-batches may have drawn meanwhile. To keep the generators' states costs 0.2 ms at each layer.
        seed_host(key(self._here.forward_key, self._num_sums))
        return total

    def _settle(self, contributions: list[_Contribution | None]) -> Tensor:
        mine: list[tuple[Node, Tensor]] = []
        first = contributions[0]
        for leaf, one in zip(self._leaves, contributions, strict=True):
            if first is None or one is None or one.place != first.place:
                # None is one that has passed through the model.
                here, there = (END if found is None else found.place for found in (first, one))
                if self._peers():
                    self._swap(DIVERGED, [])  # the others would wait for this one
                self._refuse(f"micro-batch {self._leaves[0]}", here, f"micro-batch {leaf}", there)
            if self._suspects is not None and not one.values.isfinite().all():
                self._suspects.setdefault(leaf, (2 * (int(one.place) % 2), self._num_sums))
            push(mine, (leaf, leaf + 1), one.values, self._num_leaves, torch.add)
        assert first is not None
        self._num_sums += 1
        held = self._nodes[self._world.rank]
        if len(mine) > len(held):  # in fast mode a rank holds one node
            mine = [(held[0], torch.stack([values for _, values in mine]).sum(0))]
        return self._exchange(first.place, mine)

    def _exchange(self, place: float, mine: list[tuple[Node, Tensor]]) -> Tensor:
        peers = self._peers()
        if not peers:
            return self._add(mine)
        message = self._swap(place, [values for _, values in mine])
        num_values = len(mine[0][1]) if mine else 0
        nodes = [*zip((node for node, _ in mine), message[1:].chunk(max(1, len(mine))), strict=False)]
        for peer in peers:
            # On a GPU a look at it would stop the pipeline; there, ranks that disagree wait until the time is over.
            if self._by_host and self._rooms[peer][0] != place:
                self._refuse(f"rank {self._world.rank}", place, f"rank {peer}", float(self._rooms[peer][0]))
            theirs = self._nodes[peer]
            nodes += zip(theirs, self._rooms[peer][1 : 1 + num_values * len(theirs)].chunk(len(theirs)), strict=False)
        if place == END:
            return message
        total = self._add(sorted(nodes, key=lambda held: held[0])).to(self._device)
        self._listen()
        return total

    def _swap(self, place: float, values: list[Tensor]) -> Tensor:
        """Send each peer one message, which is returned, and get one from each."""
        peers = self._peers()
        num_values = len(values[0]) if values else 0
        message = torch.cat([torch.tensor([place], dtype=torch.float64, device=self._device), *values])
        operations = []
        if self._by_host:
            message = message.cpu()
        else:
            self._rooms = {peer: message.new_empty(1 + num_values * len(self._nodes[peer])) for peer in peers}
            operations = [dist.P2POp(dist.irecv, room, peer, tag=TAG) for peer, room in self._rooms.items()]
        operations += [dist.P2POp(dist.isend, message, peer, tag=TAG) for peer in peers]
        with self._world.activity.waiting("adding up batch norm's sums"):
            for work in [*dist.batch_isend_irecv(operations), *self._ears]:
                work.wait()
        return message

    def _add(self, nodes: Sequence[tuple[Node, Tensor]]) -> Tensor:
        stack: list[tuple[Node, Tensor]] = []
        for node, values in nodes:
            push(stack, node, values, self._num_leaves, torch.add)
        # In fast mode the ranks' nodes need not be siblings.
        return torch.stack([values for _, values in stack]).sum(0) if len(stack) > 1 else stack[0][1]

    def _listen(self) -> None:
        if not self._by_host:
            return
        for peer in self._peers():
            size = 1 + self._max_values * len(self._nodes[peer])
            if peer not in self._rooms or len(self._rooms[peer]) < size:
                self._rooms[peer] = torch.empty(size, dtype=torch.float64)
        self._ears = [work for peer in self._peers() if (work := dist.irecv(self._rooms[peer], peer, tag=TAG))]

    def _peers(self) -> list[int]:
        # A rank without a micro-batch has nothing to bring, and needs nothing: what the others find for the running
        # statistics comes with the gradients.
        return [rank for rank, held in enumerate(self._nodes) if held and rank != self._world.rank]

    def _refuse(self, one: str, here: float, other: str, there: float) -> NoReturn:
        at = [f"{who} is at {self._places[int(place)] if place >= 0 else NOWHERE[place]}"
              for who, place in [(one, here), (other, there)]]  # fmt: skip
        raise TrainError(
            "synchronised batch norm: micro-batches of a step don't pass the same layers in the same order",
            where="\n".join(at),
            cause="the model takes another path for some inputs, or for some a part of it has no gradient",
            fix="set batch_norm=micro, or let each micro-batch pass each batch norm, forward and backward",
        )

    def _call(self, body: Callable[[MicroBatch], T], micro_batch: MicroBatch) -> Callable[[], T]:
        def call() -> T:
            self._here.forward_key = micro_batch.forward_key
            # Which GPU is the present one is known to each thread by itself, and autograd's own thread for a GPU would
            # be held by the first backward pass that waits.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.autograd.set_multithreading_enabled(False):
                return body(micro_batch)

        return call
