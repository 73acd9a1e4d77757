"""Sums over all micro-batches of a step, taken in the middle of the forward and backward pass, in tree order.

Gradients are needed once a step. The statistics of synchronized batch norm are needed inside a pass, which cannot
continue without them. So the micro-batches of a process run as coroutines (`coroutines.py`): all run up to the same
layer, the process adds their values up, exchanges one message with every other rank that has micro-batches, and all
resume with the total. More than 16 ranks exchange messages with one partner a round (`exchange/doubling.py`).
Two ranks, two micro-batches each, one layer:

    rank 0   post receives | mb 0 .. sum() | mb 1 .. sum() | send (0+1) | wait | (0+1)+(2+3) | post receives | mb 1 ..
    rank 1   post receives | mb 2 .. sum() | mb 3 .. sum() | send (2+3) | wait | (0+1)+(2+3) | post receives | mb 3 ..

A message is one float64 vector: [location, values of node 1, values of node 2, ...]. The location detects ranks whose
model took another path for some inputs. Without it they would add up unrelated numbers or hang.

Receives are posted before peers send, because latency dominates. Measured with gloo over loopback, two processes, 1 KB:
117 us; with receives posted at the exchange itself 267 us; gloo's all-gather 326 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from samebits.cluster.world import World
from samebits.cores import LAYER_TIME_SLICE_MS, let_gloo_threads_preempt, time_slice
from samebits.data.keyed import key
from samebits.data.order import MicroBatch
from samebits.data.seeding import seed_host
from samebits.errors import TrainError
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.doubling import Round, plan_rounds
from samebits.parallel.exchange.part import Message
from samebits.parallel.exchange.tags import LAYER
from samebits.parallel.exchange.tree_all_reduce import Work, post
from samebits.parallel.tree import Node, push

T = TypeVar("T")
_Held = tuple[Node, Tensor]
# Micro-batch index -> (0 for the forward pass or 2 for the backward pass, number of sums before).
Suspects = dict[int, tuple[int, int]]
# Locations that are no layer: the end of the pass, and a rank whose own micro-batches are at different layers.
END, DIVERGED = -1.0, -2.0
LOCATION_NAMES = {END: "its end", DIVERGED: "several layers at once"}


class _Contribution(NamedTuple):
    location: float
    values: Tensor
    finish: Callable[[Tensor], Any]


class LayerSums:
    """Sums that a step's micro-batches wait for in the middle of a pass, at the named `locations` of the model."""

    def __init__(
        self, world: World, device: torch.device, locations: Sequence[str], max_values: int, coroutines: Coroutines
    ) -> None:
        self._world, self._device, self._locations, self._coroutines = world, device, locations, coroutines
        self._max_values = max_values
        self._nodes: list[list[Node]] = []
        self._num_leaves = 0
        self._leaves: list[int] = []
        self._rounds: list[Round] = []
        # gloo sends no CUDA tensors, so values go through the host. gloo also accepts a message shorter than the
        # posted buffer, so receives can be posted before the message's size is known; NCCL requires equal sizes.
        self._is_via_host = world.backend == "gloo"
        self._buffers: dict[int, Tensor] = {}
        self._receives: list[Sequence[Work]] = []  # of each round
        self._suspects: Suspects | None = None
        self._num_sums = 0
        self._thread = threading.local()
        self._schedule()
        self.is_open = False  #: Whether the micro-batches of a step are running now.

    def move_to(self, world: World) -> None:
        """Continue in another world."""
        self._world, self._nodes = world, []
        self._schedule()

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
        """Call `body(micro_batch)`, which may call `sum`, for each micro-batch of this process; return the results.

        Args:
            suspects: Receives the micro-batches that contributed a value that is not finite, with the first location.

        Raises:
            TrainError: Two micro-batches did not reach the same layers in the same order.
        """
        if not micro_batches:
            return []
        self._leaves = [micro_batch.index for micro_batch in micro_batches]
        if nodes != self._nodes:
            self._nodes, self._num_leaves = nodes, max(last for held in nodes for _, last in held)
            self._rounds = plan_rounds(self._world.rank, nodes, self._num_leaves, 8 * (1 + self._max_values))
            self._receives = [[] for _ in self._rounds]
        self.is_open, self._suspects, self._num_sums = True, suspects, 0
        try:
            self._post_receives()
            results = self._coroutines.run([self._call(body, one) for one in micro_batches], self._combine)
            # A last exchange without values: a rank that still waits at a layer learns that the others are past it.
            # It also completes the receives posted after the last layer.
            self._add_ranks(END, [])
            return results
        finally:
            self.is_open = False

    def sum(self, location: int, values: Tensor, finish: Callable[[Tensor], T]) -> T:
        """Add values up over all micro-batches of the step, wait for all of them, and return the result of `finish`.

        Args:
            location: Where the caller is, an index of `locations`.
            values: (n,) float64, the micro-batch's contribution.
            finish: Called with the total, (n,) float64, the same bits on all ranks: what all micro-batches compute from
                it. Called once in each process, for one of its micro-batches, before the others resume.
        """
        result: T = self._coroutines.wait(_Contribution(float(location), values, finish))
        # Other micro-batches may have used the host's generator meanwhile. Seeding by a key of the micro-batch and
        # the layer is cheaper than saving and restoring its state, which costs 0.2 ms a layer.
        seed_host(key(self._thread.forward_key, self._num_sums))
        return result

    def _combine(self, contributions: list[_Contribution | None]) -> Any:
        mine: list[tuple[Node, Tensor]] = []
        first = contributions[0]
        for leaf, one in zip(self._leaves, contributions, strict=True):
            if first is None or one is None or one.location != first.location:
                # None: this micro-batch has finished its pass.
                expected, actual = (END if each is None else each.location for each in (first, one))
                self._add_ranks(DIVERGED, [])  # otherwise the other ranks would wait until their timeout
                self._refuse(f"micro-batch {self._leaves[0]}", expected, f"micro-batch {leaf}", actual)
            if self._suspects is not None and not one.values.isfinite().all():
                self._suspects.setdefault(leaf, (2 * (int(one.location) % 2), self._num_sums))
            push(mine, (leaf, leaf + 1), one.values, self._num_leaves, torch.add)
        assert first is not None
        self._num_sums += 1
        own = self._nodes[self._world.rank]
        if len(mine) > len(own):  # in fast mode a rank has a single node
            mine = [(own[0], torch.stack([values for _, values in mine]).sum(0))]
        nodes = self._add_ranks(first.location, mine)
        # In fast mode the ranks' nodes need not be siblings, so several may remain.
        total = torch.stack([values for _, values in nodes]).sum(0) if len(nodes) > 1 else nodes[0][1]
        if self._rounds:
            if self._rounds[-1].is_total:
                total = total.clone()  # a view of the buffer that the next receive overwrites
            total = total.to(self._device)
            # Only after the total is formed: `nodes` may be views of the buffers.
            self._post_receives()
        return first.finish(total)

    def _add_ranks(self, location: float, held: list[_Held]) -> list[_Held]:
        """Exchange sums with the other ranks, in rounds; return the nodes of all ranks, merged.

        Raises:
            TrainError: Another rank is somewhere else, unless this one has diverged.
        """
        num_values = len(held[0][1]) if held else 0
        fault: tuple[str, float] | None = None
        for number, each in enumerate(self._rounds):
            # The ranks of later rounds must find the fault too, so the exchange continues, without values.
            at, held = (location, held) if fault is None else (DIVERGED, [])
            sent = self._swap(number, at, held, num_values)
            received = [] if each.is_total else sent
            for peer, nodes in each.nodes_from.items():
                buffer = self._buffers[peer]
                # On a GPU, reading the location would stall the stream at each layer. There, ranks at different
                # layers are found by the collective timeout instead.
                if fault is None and self._is_via_host and buffer[0] != location:
                    is_group = number > 0 or each.is_total
                    fault = f"{'the group of ' if is_group else ''}rank {peer}", float(buffer[0])
                received += zip(nodes, buffer[1 : 1 + num_values * len(nodes)].chunk(len(nodes)), strict=False)
            held = []
            # Every rank adds the same nodes in the same order, so no further message is needed for equal bits.
            for node, added in sorted(received, key=lambda one: one[0]) if num_values and fault is None else ():
                push(held, node, added, self._num_leaves, torch.add)
        if fault is not None and location != DIVERGED:
            self._refuse(f"rank {self._world.rank}", location, *fault)
        return held

    def _swap(self, number: int, location: float, held: list[_Held], num_values: int) -> list[_Held]:
        """Send and receive the messages of a round; return what was sent, where it was sent from."""
        each = self._rounds[number]
        device = held[0][1].device if held else self._device
        message = torch.cat(
            [torch.tensor([location], dtype=torch.float64, device=device), *(values for _, values in held)]
        )
        messages: list[Message] = []
        if self._is_via_host:
            message = message.cpu()
        else:
            for peer, nodes in each.nodes_from.items():
                self._buffers[peer] = message.new_empty(1 + num_values * len(nodes))
                messages.append(Message(self._buffers[peer], peer, LAYER, is_receive=True))
        messages += [Message(message, peer, LAYER, is_receive=False) for peer in each.sends_to]
        with self._world.activity.waiting("adding up batch norm's sums"):
            works = [*(post(self._world, messages) if messages else []), *self._receives[number]]
            for work in works:
                work.wait()
        return [*zip((node for node, _ in held), message[1:].chunk(max(1, len(held))), strict=False)]

    def _schedule(self) -> None:
        if self._is_via_host:
            let_gloo_threads_preempt(self._world.num_ranks_here * torch.get_num_threads())

    def _post_receives(self) -> None:
        if not self._is_via_host:
            return
        for number, each in enumerate(self._rounds):
            messages = [
                Message(self._buffer(peer, nodes), peer, LAYER, is_receive=True)
                for peer, nodes in each.nodes_from.items()
            ]
            self._receives[number] = post(self._world, messages) if messages else []

    def _buffer(self, peer: int, nodes: Sequence[Node]) -> Tensor:
        size = 1 + self._max_values * len(nodes)
        if peer not in self._buffers or len(self._buffers[peer]) < size:
            self._buffers[peer] = torch.empty(size, dtype=torch.float64)
        return self._buffers[peer]

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
            long = time_slice(LAYER_TIME_SLICE_MS) if self._rounds and self._is_via_host else nullcontext()
            with long, torch.autograd.set_multithreading_enabled(False):
                return body(micro_batch)

        return call
