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
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import (
    _BatchNorm,  # the base class of all batch norms has no public name
)

from samebits.cluster.world import World
from samebits.cores import LAYER_TIME_SLICE_MS, let_gloo_threads_preempt, time_slice
from samebits.data.keyed import key
from samebits.data.order import MicroBatch
from samebits.data.seeding import seed_host
from samebits.errors import ConfigError, TrainError
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.part import LAYER, Message, Round, plan_rounds
from samebits.parallel.exchange.tree_all_reduce import Work, post
from samebits.parallel.tree import Node, push

T = TypeVar("T")
_Held = tuple[Node, Tensor]
# Micro-batch index -> (0 for the forward pass or 2 for the backward pass, number of sums before).
Suspects = dict[int, tuple[int, int]]
# Locations that are no layer: the end of the pass, and a rank whose own micro-batches are at different layers.
END = -1.0
DIVERGED = -2.0
LOCATION_NAMES = {END: "its end", DIVERGED: "several layers at once"}


class _Contribution(NamedTuple):
    location: float
    values: Tensor
    finish: Callable[[Tensor], Any]


class LayerSums:
    """Sums that a step's micro-batches wait for in the middle of a pass, at the named `locations` of the model."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        locations: Sequence[str],
        max_values: int,
        coroutines: Coroutines,
    ) -> None:
        self._world = world
        self._device = device
        self._locations = locations
        self._coroutines = coroutines
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
        self._world = world
        self._nodes = []
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
            self._nodes = nodes
            self._num_leaves = max(last for held in nodes for _, last in held)
            self._rounds = plan_rounds(
                self._world.rank, nodes, self._num_leaves, 8 * (1 + self._max_values)
            )
            self._receives = [[] for _ in self._rounds]
        self.is_open = True
        self._suspects = suspects
        self._num_sums = 0
        try:
            self._post_receives()
            results = self._coroutines.run(
                [self._call(body, one) for one in micro_batches], self._combine
            )
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
                # otherwise the other ranks would wait until their timeout
                self._add_ranks(DIVERGED, [])
                self._refuse(
                    f"micro-batch {self._leaves[0]}", expected, f"micro-batch {leaf}", actual
                )
            if self._suspects is not None and not one.values.isfinite().all():
                self._suspects.setdefault(leaf, (2 * (int(one.location) % 2), self._num_sums))
            push(mine, (leaf, leaf + 1), one.values, self._num_leaves, torch.add)
        assert first is not None
        self._num_sums += 1
        ((_, total),) = self._add_ranks(first.location, mine)
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
                received += zip(
                    nodes, buffer[1 : 1 + num_values * len(nodes)].chunk(len(nodes)), strict=False
                )
            held = []
            # Every rank adds the same nodes in the same order, so no further message is needed for equal bits.
            for node, added in (
                sorted(received, key=lambda one: one[0]) if num_values and fault is None else ()
            ):
                push(held, node, added, self._num_leaves, torch.add)
        if fault is not None and location != DIVERGED:
            self._refuse(f"rank {self._world.rank}", location, *fault)
        return held

    def _swap(
        self, number: int, location: float, held: list[_Held], num_values: int
    ) -> list[_Held]:
        """Send and receive the messages of a round; return what was sent, where it was sent from."""
        each = self._rounds[number]
        device = held[0][1].device if held else self._device
        message = torch.cat(
            [
                torch.tensor([location], dtype=torch.float64, device=device),
                *(values for _, values in held),
            ]
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
        return [
            *zip((node for node, _ in held), message[1:].chunk(max(1, len(held))), strict=False)
        ]

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
            long = (
                time_slice(LAYER_TIME_SLICE_MS)
                if self._rounds and self._is_via_host
                else nullcontext()
            )
            with long, torch.autograd.set_multithreading_enabled(False):
                return body(micro_batch)

        return call


# Synchronized batch norm (`batch_norm=sync`): statistics over all micro-batches of a step, at any world size.
#
# torch's SyncBatchNorm reduces over ranks, so its result depends on the world, and it needs CUDA. This one reduces over
# micro-batches in tree order (`layer_sums.py`), on CPU and CUDA. Equations: Ioffe and Szegedy, "Batch Normalization",
# ICML 2015, section 3. With m values a channel in the step, over (N, ...), and y = (x - mean) / sqrt(var + eps):
#
#     forward    contributes  m_i, sum x, sum x^2        mean = sum x / m    var = sum x^2 / m - mean^2
#     backward   contributes  sum dy * y, sum dy         dx = (dy - sum dy / m - y * sum(dy * y) / m) / sqrt(var + eps)
#
# Each pass through a layer is one `LayerSums.sum`, where all micro-batches wait for each other:
#
#     micro-batch 0   bn1 forward | bn2 forward | loss | bn2 backward | bn1 backward
#     micro-batch 1   bn1 forward | bn2 forward | loss | bn2 backward | bn1 backward
#     location            0             2                    3              1
#
# Sums are float64: sum x^2 / m - mean^2 cancels, and in float32 it can lose all digits of a small variance.
#
# Shapes: (N, C, ...) inputs, (C,) statistics.


class _Statistics(NamedTuple):
    """What a forward pass through a layer takes from the sums over the step."""

    mean: Tensor  #: (C,) float32.
    var: Tensor  #: (C,) float32, biased.
    num_values: Tensor  #: () float64, values a channel.
    scale: Tensor  #: (C,) float32, 1 / sqrt(var + eps).
    ones: Tensor  #: (C,) float32.
    #: (C,) float64 each, the new running mean and variance; empty without running statistics.
    running: Sequence[Tensor]


class _SynchronizedBatchNorm(_BatchNorm):
    """Mixin for torch's batch norms: in training, the statistics are those of the whole step."""

    sums: LayerSums
    location: int  # of its forward pass in `sums`; the backward pass has location + 1

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (N, C, ...) by the step's statistics. In evaluation mode or outside of a step, as torch does."""
        if not (self.training and self.sums.is_open):
            return super().forward(input)
        # Each torch class accepts other dimensions, and checks them by this method in its own forward.
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # untyped in torch
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, self)
        return output

    def statistics(self, total: Tensor) -> _Statistics:
        """Return what all micro-batches need of a total, (1 + 2 C,) float64: count, sums and sums of squares."""
        count, (mean, square) = total[0], (total[1:] / total[0]).chunk(2)
        var = (square - mean * mean).clamp_min_(0.0)  # rounding can make it slightly negative
        mean_32 = mean.float()
        var_32 = var.float()
        running: list[Tensor] = []
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            # As in torch: normalization uses the biased variance, the running variance is unbiased.
            unbiased = var * (count / (count - 1).clamp_min(1))
            momentum = self.momentum
            # Without a momentum, torch takes the mean over all steps so far.
            factor: Any = (
                1.0 / (self.num_batches_tracked + 1).double() if momentum is None else momentum
            )
            pairs = (self.running_mean, mean), (self.running_var, unbiased)
            running = [old.double() * (1.0 - factor) + new * factor for old, new in pairs]
        scale = torch.rsqrt(var_32 + self.eps)
        return _Statistics(mean_32, var_32, count, scale, torch.ones_like(scale), running)

    def update(self, running: Sequence[Tensor]) -> None:
        """Set the running statistics, (C,) float64 each or none, at each micro-batch from and to equal values."""
        if running:
            assert self.num_batches_tracked is not None
            assert self.running_mean is not None
            assert self.running_var is not None
            self.num_batches_tracked.add_(1)
            self.running_mean.copy_(running[0])
            self.running_var.copy_(running[1])


class SynchronizedBatchNorm1d(_SynchronizedBatchNorm, nn.BatchNorm1d):
    """Synchronized batch norm over (N, C) or (N, C, L) inputs."""


class SynchronizedBatchNorm2d(_SynchronizedBatchNorm, nn.BatchNorm2d):
    """Synchronized batch norm over (N, C, H, W) inputs."""


class SynchronizedBatchNorm3d(_SynchronizedBatchNorm, nn.BatchNorm3d):
    """Synchronized batch norm over (N, C, D, H, W) inputs."""


KINDS: dict[type[nn.Module], type[_SynchronizedBatchNorm]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


def synchronize(
    model: nn.Module, world: World, device: torch.device, coroutines: Coroutines
) -> LayerSums | None:
    """Make a model's batch norms take their statistics over a step. Parameters, buffers, names and hooks do not change.

    Returns:
        The sums in which the micro-batches of a step run; None for a model without batch norm. Layer i has the
        locations 2 i (forward) and 2 i + 1 (backward).

    Raises:
        ConfigError: A batch norm is of a class that cannot be synchronized.
    """
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    if not layers:
        return None
    for name, module in layers.items():
        if type(module) not in KINDS and not isinstance(module, _SynchronizedBatchNorm):
            raise ConfigError(
                f"batch_norm=sync cannot synchronize {name}, a {type(module).__name__}",
                allowed=", ".join(f"torch.nn.{kind.__name__}" for kind in KINDS),
                fix="Set batch_norm=micro, or build the model with one of the allowed classes.",
            )
    locations = [f"{name}, {direction}" for name in layers for direction in ("forward", "backward")]
    # A forward pass contributes a count, and two values a channel.
    longest = max(1 + 2 * int(layer.num_features) for layer in layers.values())  # type: ignore[arg-type]  # a module's attributes are Tensor or Module to mypy
    sums = LayerSums(world, device, locations, longest, coroutines)
    for number, layer in enumerate(layers.values()):
        # A new class instead of a new module, as in torch's lazy modules: references to the module stay valid.
        if type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]
        assert isinstance(layer, _SynchronizedBatchNorm)
        layer.sums = sums
        layer.location = 2 * number
    return sums


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: _SynchronizedBatchNorm,
    ) -> Tensor:
        # torch's own kernel: two passes, accumulated in float64 on CPUs. For 16-bit inputs it returns float32
        # statistics only if the running statistics it updates are float32, hence the dummies.
        dummies: tuple[Tensor | None, Tensor | None] = (None, None)
        if inputs.dtype != torch.float32:
            dummies = (
                inputs.new_zeros(inputs.shape[1], dtype=torch.float32),
                inputs.new_ones(inputs.shape[1], dtype=torch.float32),
            )
        mean, var = (
            value.double() for value in torch.batch_norm_update_stats(inputs, *dummies, 0.0)
        )
        # Sums are rebuilt from mean and variance: one kernel for both, and the variance is exact to float32.
        num = mean.new_full((1,), inputs.numel() // inputs.shape[1])
        values = torch.cat([num, num * mean, num * (var + mean * mean)])
        of_step = layer.sums.sum(layer.location, values, layer.statistics)
        layer.update(of_step.running)
        ctx.save_for_backward(inputs, weight, *of_step[:5])
        ctx.layer = layer
        # In evaluation form (False): one multiplication and one addition a value, in the inputs' memory layout.
        mean = of_step.mean
        var = of_step.var
        output: Tensor = torch.native_batch_norm(
            inputs, weight, bias, mean, var, False, 0.0, layer.eps
        )[0]
        return output

    @staticmethod
    # The sums in it have no gradient of their own: a second derivative is an error, instead of a wrong number.
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, var, count, scale, ones = ctx.saved_tensors
        layer: _SynchronizedBatchNorm = ctx.layer
        # The gradients of weight and bias are the two sums needed over this micro-batch: of grad * normalized, and of
        # grad. They are returned unsummed: the reducer adds them up like all gradients.
        _, with_normalized, plain = torch.ops.aten.native_batch_norm_backward(
            grad, inputs, ones, None, None, mean, scale, True, layer.eps, [False, True, True]
        )
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad

        def factors(total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean_with_normalized, mean_plain = (total / count).float().chunk(2)
            times = scale if weight is None else scale * weight
            return times, -times * mean_with_normalized, -times * mean_plain

        values = torch.cat([with_normalized, plain]).double()
        times, normalized_times, offset_times = layer.sums.sum(layer.location + 1, values, factors)
        grad_input = None
        if needs_input:
            # times * (grad - mean_plain - normalized * mean_with_normalized), the last two terms by one kernel.
            offset = torch.native_batch_norm(
                inputs.float(), normalized_times, offset_times, mean, var, False, 0.0, layer.eps
            )[0]
            shape = [1, -1] + [1] * (inputs.dim() - 2)
            grad_input = offset.addcmul_(grad.float(), times.view(shape)).to(inputs.dtype)
        return (
            grad_input,
            with_normalized if needs_weight else None,
            plain if needs_bias else None,
            None,
        )
