"""Batch norm over all micro-batches of a step (`batch_norm=sync`), on CPU and CUDA, the same bits at any world size.

Each micro-batch brings its number of values, their sum and their sum of squares for each channel; the backward pass
brings the two sums that the gradient of the input needs (Ioffe and Szegedy, "Batch Normalization", 2015, section 3).
They are added in float64: sums of squares then lose nothing that float32 inputs have.

Shapes: N samples, C channels, any further dimensions behind them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import ConfigError
from lockstep.parallel.layer_sums import LayerSums


class _Synchronised(_BatchNorm):
    """What makes a batch norm of torch a synchronised one: its statistics in training are those of the whole step."""

    sums: LayerSums
    place: int  # of its forward pass in the meeting; the backward pass has the next

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (N, C, ...) by the step's statistics; in evaluation mode, or outside of a step, as torch does."""
        if not (self.training and self.sums.is_open):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch gives it no types
        output: Tensor = _Normalise.apply(input, self.weight, self.bias, self)
        return output

    def update(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics.

        Args:
            mean: (C,) float64, over the step.
            var: (C,) float64, its biased variance.
            count: () float64, values that they are taken over.
        """
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.double()
        unbiased = var * (count / (count - 1).clamp_min(1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.double() * (1.0 - factor) + value * factor)


class SynchronisedBatchNorm1d(_Synchronised, nn.BatchNorm1d):
    """(N, C) or (N, C, L) inputs."""


class SynchronisedBatchNorm2d(_Synchronised, nn.BatchNorm2d):
    """(N, C, H, W) inputs."""


class SynchronisedBatchNorm3d(_Synchronised, nn.BatchNorm3d):
    """(N, C, D, H, W) inputs."""


KINDS: dict[type[nn.Module], type[_Synchronised]] = {
    nn.BatchNorm1d: SynchronisedBatchNorm1d,
    nn.BatchNorm2d: SynchronisedBatchNorm2d,
    nn.BatchNorm3d: SynchronisedBatchNorm3d,
}


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """A model's batch norms by name.

    Raises:
        ConfigError: One is of a class whose statistics can't be synchronised.
    """
    found: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)
    }
    for name, module in found.items():
        if type(module) not in KINDS and not isinstance(module, _Synchronised):
            raise ConfigError(
                f"batch_norm=sync can't synchronise {name}, a {type(module).__name__}",
                allowed=", ".join(f"torch.nn.{kind.__name__}" for kind in KINDS),
                fix="set batch_norm=micro, or build the model with one of these",
            )
    return found


def synchronise(layers: dict[str, nn.Module], sums: LayerSums) -> None:
    """Let batch norms take their statistics over a step. Parameters, buffers, names and hooks stay as they are.

    Args:
        layers: As `batch_norms` gives them; layer i meets at the places 2 i (forward) and 2 i + 1 (backward).
        sums: Where they meet.
    """
    for number, layer in enumerate(layers.values()):
        # As torch's own lazy modules do: all that refers to the module keeps doing so.
        if type(layer) in KINDS:
            layer.__class__ = KINDS[type(layer)]
        assert isinstance(layer, _Synchronised)
        layer.sums, layer.place = sums, 2 * number


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Synchronised) -> Tensor:
        # Torch's own kernel: two passes, accumulated in float64 on CPUs. It gives float32 for lower precisions too, but
        # only if it is given float32 to update.
        zeros, ones = inputs.new_zeros(inputs.shape[1], dtype=torch.float32), inputs.new_ones((), dtype=torch.float32)
        ones = ones.expand(inputs.shape[1]).contiguous()
        mean, var = (value.double() for value in torch.batch_norm_update_stats(inputs, zeros, ones, 0.0))
        num = mean.new_full((1,), inputs.numel() // inputs.shape[1])
        total = layer.sums.sum(layer.place, torch.cat([num, num * mean, num * (var + mean * mean)]))
        count, (mean, square) = total[0], (total[1:] / total[0]).chunk(2)
        var = (square - mean * mean).clamp_min_(0.0)
        layer.update(mean, var, count)
        mean, var = mean.float(), var.float()
        ctx.save_for_backward(inputs, weight, mean, var, count)
        ctx.layer = layer
        # With given statistics this is one multiplication and one addition a value, in the inputs' memory layout.
        output: Tensor = torch.native_batch_norm(inputs, weight, bias, mean, var, False, 0.0, layer.eps)[0]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mean, var, count = ctx.saved_tensors
        layer: _Synchronised = ctx.layer
        scale = torch.rsqrt(var + layer.eps)
        # Asked for weight and bias only, this is the sums over this micro-batch of grad * normalised, and of grad.
        _, with_normalised, plain = torch.ops.aten.native_batch_norm_backward(
            grad, inputs, torch.ones_like(scale), None, None, mean, scale, True, layer.eps, [False, True, True]
        )
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        total = layer.sums.sum(layer.place + 1, torch.cat([with_normalised, plain]).double())
        mean_with_normalised, mean_plain = (total / count).float().chunk(2)
        grad_input = None
        if needs_input:
            if weight is not None:
                scale = scale * weight
            # scale * (grad - mean_plain - normalised * mean_with_normalised)
            offset = torch.native_batch_norm(
                inputs.float(), -scale * mean_with_normalised, -scale * mean_plain, mean, var, False, 0.0, layer.eps
            )[0]
            shape = [1, -1] + [1] * (inputs.dim() - 2)
            grad_input = offset.addcmul_(grad.float(), scale.view(shape)).to(inputs.dtype)
        return (
            grad_input,
            with_normalised if needs_weight else None,
            plain if needs_bias else None,
            None,
        )
