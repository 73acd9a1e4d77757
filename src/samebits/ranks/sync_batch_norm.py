"""SyncBatchNorm on CPU tensors, for which torch has no kernels. Sums over ranks are added in the order of the ranks.

Follows torch.nn.modules._functions.SyncBatchNorm, which computes on GPUs: statistics of all ranks' samples, also of
ranks with fewer or none, and the gradient of the whole. Sums are in float64.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def forward(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """Normalize a CPU tensor of shape (N, C, ...) by the statistics of all ranks of the module's group."""
    group = module.process_group or dist.group.WORLD
    rate = module.momentum
    if module.track_running_stats and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if rate is None:  # a cumulative average
            rate = 1.0 / float(module.num_batches_tracked)
    sums = _statistics(x, group)
    if (
        module.track_running_stats
        and module.running_mean is not None
        and module.running_var is not None
    ):
        mean, variance, count = sums
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), rate or 0.0)
        unbiased = variance * (count / (count - 1).clamp(min=1.0))
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), rate or 0.0)
    normalized: Tensor = _Normalize.apply(x, *sums, module.eps, group)
    if module.weight is None:
        return normalized
    shape = _by_channel(x)
    return torch.addcmul(module.bias.view(shape), normalized, module.weight.view(shape)).to(x.dtype)


def is_synced(module: nn.SyncBatchNorm, x: Tensor) -> bool:
    """Return whether the module takes the statistics of several ranks, on a CPU, for a tensor of shape (N, C, ...)."""
    if x.device.type != "cpu" or not module.training or not dist.is_initialized():
        return False
    group: Any = module.process_group or dist.group.WORLD
    return bool(group.size() > 1)


def _dims(x: Tensor) -> list[int]:
    return [each for each in range(x.dim()) if each != 1]


def _by_channel(x: Tensor) -> tuple[int, ...]:
    """Return the shape in which values of channels are those of a tensor of shape (N, C, ...)."""
    return 1, -1, *[1] * (x.dim() - 2)


def _over_ranks(values: Tensor, group: Any) -> Tensor:
    """Return what all ranks have, of shape (ranks, ...), in the order of the ranks."""
    every = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(every, values, group=group)
    return torch.stack(every)


@torch.no_grad()
def _statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel, of shape (C,), and the number of values, over all ranks."""
    wide = x.detach().double()
    dims = _dims(x)
    count = float(x.numel() // max(x.shape[1], 1))
    own_sum = wide.sum(dims)
    own_mean = own_sum / max(count, 1.0)
    own_squares = (wide - own_mean.view(_by_channel(x))).square().sum(dims)
    every = _over_ranks(torch.cat([own_sum, own_squares, own_sum.new_tensor([count])]), group)
    sums = every[:, : x.shape[1]]
    squares = every[:, x.shape[1] : -1]
    counts = every[:, -1:]
    total = counts.sum()
    mean = sums.sum(0) / total
    between = counts * (sums / counts.clamp(min=1.0) - mean).square()
    return mean, (squares + between).sum(0) / total, total


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps), whose gradient runs through the statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, count: Tensor, eps: float, group: Any
    ) -> Tensor:
        shape = _by_channel(x)
        scale = (variance + eps).rsqrt().view(shape)
        normalized = ((x.double() - mean.view(shape)) * scale).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        ctx.save_for_backward(normalized, scale, count)
        ctx.group = group
        ctx.dtype = x.dtype
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalized, scale, count = ctx.saved_tensors
        dims = _dims(gradient)
        wide = gradient.double()
        own = torch.stack([wide.sum(dims), (wide * normalized).sum(dims)])
        of_ones, of_values = (_over_ranks(own, ctx.group).sum(0) / count).view(2, *scale.shape)
        found = (wide - of_ones - normalized * of_values) * scale
        return found.to(ctx.dtype), None, None, None, None, None
