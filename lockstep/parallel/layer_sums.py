"""Sums over all micro-batches of a step, taken in the middle of the forward and backward pass, in tree order.

Gradients are needed once a step. The statistics of synchronized batch norm are needed inside a pass, which cannot
continue without them. So the micro-batches of a process run as coroutines (`coroutines.py`): all run up to the same
layer, the process adds their values up, exchanges one message with every other rank that has micro-batches, and all
resume with the total. Two ranks, two micro-batches each, one layer:

    rank 0   post receives | mb 0 .. sum() | mb 1 .. sum() | send (0+1) | wait | (0+1)+(2+3) | post receives | mb 0 ..
    rank 1   post receives | mb 2 .. sum() | mb 3 .. sum() | send (2+3) | wait | (0+1)+(2+3) | post receives | mb 2 ..

A message is one float64 vector: [location, values of node 1, values of node 2, ...]. The location detects ranks whose
model took another path for some inputs. Without it they would add up unrelated numbers or hang.

Receives are posted before peers send, because latency dominates. Measured with gloo over loopback, two processes, 1 KB:
117 us; with receives posted at the exchange itself 267 us; gloo's all-gather 326 us.
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
TAG = 1 << 30  # far from the tags of gradient buckets
# Micro-batch index -> (0 for the forward pass or 2 for the backward pass, number of sums before).
Suspects = dict[int, tuple[int, int]]
# Locations that are no layer: the end of the pass, and a rank whose own micro-batches are at different layers.
END, DIVERGED = -1.0, -2.0
LOCATION_NAMES = {END: "its end", DIVERGED: "several layers at once"}


class _Contribution(NamedTuple):
    location: float
    values: Tensor


class LayerSums:
    """Sums that the micro-batches of a step wait for in the middle of a pass.

    Args:
        world: The ranks.
        device: Where the sums are needed.
        locations: Names of all points of the model at which `sum` is called, one for each layer and direction.
        max_values: Largest number of values that a micro-batch contributes to one sum.
        coroutines: Runs the process's micro-batches.

    Attributes:
        is_open: Whether the micro-batches of a step are running now.
    """

    def __init__(
        self, world: World, device: torch.device, locations: Sequence[str], max_values: int, coroutines: Coroutines
    ) -> None:
        self._world, self._device, self._locations, self._coroutines = world, device, locations, coroutines
        self._max_values = max_values
        self._nodes: list[list[Node]] = []
        self._num_leaves = 0
        self._leaves: list[int] = []
        # gloo sends no CUDA tensors, so values go through the host. gloo also accepts a message shorter than the
        # posted buffer, so receives can be posted before the message's size is known; NCCL requires equal sizes.
        self._is_via_host = world.backend == "gloo"
        self._buffers: dict[int, Tensor] = {}
        self._receives: list[dist.Work] = []
        self._suspects: Suspects | None = None
        self._num_sums = 0
        self._thread = threading.local()
        self.is_open = False

    def __deepcopy__(self, memo: object) -> LayerSums:
        """Return this object itself: a copy of a model (its EMA) shares the sums of the model."""
        return self

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        nodes: list[list[Node]],
        body: Callable[[MicroBatch], T],
        suspects: Suspects | None = None,
    ) -> list[T]:
        """Call `body(micro_batch)` for each micro-batch of this process; inside it, `sum` can be called.

        Args:
            micro_batches: This process's micro-batches of one step.
            nodes: For each rank, its nodes of the tree.
            body: Runs a micro-batch.
            suspects: Receives the micro-batches that contributed a value that is not finite, with the first location.

        Returns:
            The result of each call.

        Raises:
            TrainError: Two micro-batches did not reach the same layers in the same order.
        """
        if not micro_batches:
            return []
        self._nodes, self._leaves = nodes, [micro_batch.index for micro_batch in micro_batches]
        self._num_leaves = max(last for held in nodes for _, last in held)
        self.is_open, self._suspects, self._num_sums = True, suspects, 0
        try:
            self._post_receives()
            results = self._coroutines.run([self._call(body, one) for one in micro_batches], self._combine)
            # A last exchange without values: a rank that still waits at a layer learns that the others are past it.
            # It also completes the receives posted after the last layer.
            if self._peers():
                self._exchange(END, [])
            return results
        finally:
            self.is_open = False

    def sum(self, location: int, values: Tensor) -> Tensor:
        """Add values up over all micro-batches of the step. Waits for all of them.

        Args:
            location: Where the caller is, an index of `locations`.
            values: (n,) float64, the micro-batch's contribution.

        Returns:
            (n,) float64, the same bits on all ranks.
        """
        total: Tensor = self._coroutines.wait(_Contribution(float(location), values))
        # Other micro-batches may have used the host's generator meanwhile. Seeding by a key of the micro-batch and
        # the layer is cheaper than saving and restoring its state, which costs 0.2 ms a layer.
        seed_host(key(self._thread.forward_key, self._num_sums))
        return total

    def _combine(self, contributions: list[_Contribution | None]) -> Tensor:
        mine: list[tuple[Node, Tensor]] = []
        first = contributions[0]
        for leaf, one in zip(self._leaves, contributions, strict=True):
            if first is None or one is None or one.location != first.location:
                # None: this micro-batch has finished its pass.
                expected, actual = (END if each is None else each.location for each in (first, one))
                if self._peers():
                    self._swap(DIVERGED, [])  # otherwise the other ranks would wait until their timeout
                self._refuse(f"micro-batch {self._leaves[0]}", expected, f"micro-batch {leaf}", actual)
            if self._suspects is not None and not one.values.isfinite().all():
                self._suspects.setdefault(leaf, (2 * (int(one.location) % 2), self._num_sums))
            push(mine, (leaf, leaf + 1), one.values, self._num_leaves, torch.add)
        assert first is not None
        self._num_sums += 1
        own = self._nodes[self._world.rank]
        if len(mine) > len(own):  # in fast mode a rank has a single node
            mine = [(own[0], torch.stack([values for _, values in mine]).sum(0))]
        return self._exchange(first.location, mine)

    def _exchange(self, location: float, mine: list[tuple[Node, Tensor]]) -> Tensor:
        peers = self._peers()
        if not peers:
            return self._add(mine)
        message = self._swap(location, [values for _, values in mine])
        num_values = len(mine[0][1]) if mine else 0
        nodes = [*zip((node for node, _ in mine), message[1:].chunk(max(1, len(mine))), strict=False)]
        for peer in peers:
            # On a GPU, reading the location would stall the stream at each layer. There, ranks at different layers
            # are found by the collective timeout instead.
            if self._is_via_host and self._buffers[peer][0] != location:
                self._refuse(f"rank {self._world.rank}", location, f"rank {peer}", float(self._buffers[peer][0]))
            theirs = self._nodes[peer]
            nodes += zip(theirs, self._buffers[peer][1 : 1 + num_values * len(theirs)].chunk(len(theirs)), strict=False)
        if location == END:
            return message
        # Every rank adds the same nodes in the same order, so no second message is needed for equal bits.
        total = self._add(sorted(nodes, key=lambda each: each[0])).to(self._device)
        # Only after the total is formed: `nodes` are views of the buffers that the next receives overwrite.
        self._post_receives()
        return total

    def _swap(self, location: float, values: list[Tensor]) -> Tensor:
        """Send one message to each peer, receive one from each, and return the message sent."""
        peers = self._peers()
        num_values = len(values[0]) if values else 0
        message = torch.cat([torch.tensor([location], dtype=torch.float64, device=self._device), *values])
        operations = []
        if self._is_via_host:
            message = message.cpu()
        else:
            self._buffers = {peer: message.new_empty(1 + num_values * len(self._nodes[peer])) for peer in peers}
            operations = [dist.P2POp(dist.irecv, buffer, peer, tag=TAG) for peer, buffer in self._buffers.items()]
        operations += [dist.P2POp(dist.isend, message, peer, tag=TAG) for peer in peers]
        with self._world.activity.waiting("adding up batch norm's sums"):
            for work in [*dist.batch_isend_irecv(operations), *self._receives]:
                work.wait()
        return message

    def _add(self, nodes: Sequence[tuple[Node, Tensor]]) -> Tensor:
        stack: list[tuple[Node, Tensor]] = []
        for node, values in nodes:
            push(stack, node, values, self._num_leaves, torch.add)
        # In fast mode the ranks' nodes need not be siblings, so several may remain.
        return torch.stack([values for _, values in stack]).sum(0) if len(stack) > 1 else stack[0][1]

    def _post_receives(self) -> None:
        if not self._is_via_host:
            return
        for peer in self._peers():
            size = 1 + self._max_values * len(self._nodes[peer])
            if peer not in self._buffers or len(self._buffers[peer]) < size:
                self._buffers[peer] = torch.empty(size, dtype=torch.float64)
        self._receives = [work for peer in self._peers() if (work := dist.irecv(self._buffers[peer], peer, tag=TAG))]

    def _peers(self) -> list[int]:
        # A rank without a micro-batch contributes nothing and needs no total: it receives the change of the running
        # statistics together with the gradients.
        return [rank for rank, nodes in enumerate(self._nodes) if nodes and rank != self._world.rank]

    def _refuse(self, one: str, location: float, other: str, other_location: float) -> NoReturn:
        where = [f"{name} is at {self._locations[int(at)] if at >= 0 else LOCATION_NAMES[at]}"
                 for name, at in [(one, location), (other, other_location)]]  # fmt: skip
        raise TrainError(
            "batch_norm=sync: the micro-batches of a step do not reach the same layers in the same order",
            where="\n".join(where),
            cause="the model takes another path for some inputs, or a part of it has no gradient for some inputs",
            fix="Set batch_norm=micro, or let each micro-batch use every batch norm, forward and backward.",
        )

    def _call(self, body: Callable[[MicroBatch], T], micro_batch: MicroBatch) -> Callable[[], T]:
        def call() -> T:
            self._thread.forward_key = micro_batch.forward_key
            # The current GPU is a property of each thread. Autograd must run in this thread as well: its own thread
            # for a GPU would be blocked by the first backward pass that waits.
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.autograd.set_multithreading_enabled(False):
                return body(micro_batch)

        return call
