"""Synchronized batch norm (`batch_norm=sync`): statistics over all micro-batches of a step, at any world size.

torch's SyncBatchNorm reduces over ranks, so its result depends on the world, and it needs CUDA. This one reduces over
micro-batches in tree order (`layer_sums.py`), on CPU and CUDA. Equations: Ioffe and Szegedy, "Batch Normalization",
ICML 2015, section 3. With m values a channel in the step, over (N, ...), and y = (x - mean) / sqrt(var + eps):

    forward    contributes  m_i, sum x, sum x^2        mean = sum x / m    var = sum x^2 / m - mean^2
    backward   contributes  sum dy * y, sum dy         dx = (dy - sum dy / m - y * sum(dy * y) / m) / sqrt(var + eps)

Each pass through a layer is one `LayerSums.sum`, where all micro-batches wait for each other:

    micro-batch 0   bn1 forward | bn2 forward | loss | bn2 backward | bn1 backward
    micro-batch 1   bn1 forward | bn2 forward | loss | bn2 backward | bn1 backward
    location            0             2                    3              1

Sums are float64: sum x^2 / m - mean^2 cancels, and in float32 it can lose all digits of a small variance.

Shapes: (N, C, ...) inputs, (C,) statistics.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm  # the base class of all batch norms has no public name

from samebits.cluster.world import World
from samebits.errors import ConfigError
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.layer_sums import LayerSums


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
        mean_32, var_32 = mean.float(), var.float()
        running: list[Tensor] = []
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            # As in torch: normalization uses the biased variance, the running variance is unbiased.
            unbiased = var * (count / (count - 1).clamp_min(1))
            momentum = self.momentum
            # Without a momentum, torch takes the mean over all steps so far.
            factor: Any = 1.0 / (self.num_batches_tracked + 1).double() if momentum is None else momentum
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


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's batch norms by name. Raises ConfigError if one is of a class that cannot be synchronized."""
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    for name, module in layers.items():
        if type(module) not in KINDS and not isinstance(module, _SynchronizedBatchNorm):
            raise ConfigError(
                f"batch_norm=sync cannot synchronize {name}, a {type(module).__name__}",
                allowed=", ".join(f"torch.nn.{kind.__name__}" for kind in KINDS),
                fix="Set batch_norm=micro, or build the model with one of the allowed classes.",
            )
    return layers


def synchronize(model: nn.Module, world: World, device: torch.device, coroutines: Coroutines) -> LayerSums | None:
    """Make a model's batch norms take their statistics over a step. Parameters, buffers, names and hooks do not change.

    Returns:
        The sums in which the micro-batches of a step run; None for a model without batch norm. Layer i has the
        locations 2 i (forward) and 2 i + 1 (backward).

    Raises:
        ConfigError: A batch norm is of a class that cannot be synchronized.
    """
    layers = batch_norms(model)
    if not layers:
        return None
    locations = [f"{name}, {direction}" for name in layers for direction in ("forward", "backward")]
    # A forward pass contributes a count, and two values a channel.
    longest = max(1 + 2 * int(layer.num_features) for layer in layers.values())  # type: ignore[arg-type]  # a module's attributes are Tensor or Module to mypy
    sums = LayerSums(world, device, locations, longest, coroutines)
    for number, layer in enumerate(layers.values()):
        # A new class instead of a new module, as in torch's lazy modules: references to the module stay valid.
        if type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]
        assert isinstance(layer, _SynchronizedBatchNorm)
        layer.sums, layer.location = sums, 2 * number
    return sums


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _SynchronizedBatchNorm
    ) -> Tensor:
        # torch's own kernel: two passes, accumulated in float64 on CPUs. For 16-bit inputs it returns float32
        # statistics only if the running statistics it updates are float32, hence the dummies.
        dummies: tuple[Tensor | None, Tensor | None] = (None, None)
        if inputs.dtype != torch.float32:
            dummies = (
                inputs.new_zeros(inputs.shape[1], dtype=torch.float32),
                inputs.new_ones(inputs.shape[1], dtype=torch.float32),
            )
        mean, var = (value.double() for value in torch.batch_norm_update_stats(inputs, *dummies, 0.0))
        # Sums are rebuilt from mean and variance: one kernel for both, and the variance is exact to float32.
        num = mean.new_full((1,), inputs.numel() // inputs.shape[1])
        values = torch.cat([num, num * mean, num * (var + mean * mean)])
        of_step = layer.sums.sum(layer.location, values, layer.statistics)
        layer.update(of_step.running)
        ctx.save_for_backward(inputs, weight, *of_step[:5])
        ctx.layer = layer
        # In evaluation form (False): one multiplication and one addition a value, in the inputs' memory layout.
        mean, var = of_step.mean, of_step.var
        output: Tensor = torch.native_batch_norm(inputs, weight, bias, mean, var, False, 0.0, layer.eps)[0]
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
        return (grad_input, with_normalized if needs_weight else None, plain if needs_bias else None, None)
