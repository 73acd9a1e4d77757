"""Truncated normal weights: torch's own function draws other numbers in each generation of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from samebits.portable import floats
from samebits.portable.grid import over

_LIKELY = 0.3  # of numbers within the bounds; from here on, normal numbers are drawn, below uniform ones


@contextmanager
def in_torch_init() -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` draw as here, also where a package has imported it by name."""
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = draw_truncated_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@torch.no_grad()
def draw_truncated_normal(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Generator | None = None
) -> Tensor:
    """Fill a tensor of any shape with normal numbers between `a` and `b`: those that are rejected are drawn again.

    Each round draws numbers for the whole tensor.
    """
    below_a, below_b = (0.5 + 0.5 * floats.erf((x - mean) / std * 0.5**0.5) for x in (a, b))
    if below_b - below_a > _LIKELY:
        low, high = (tensor.new_tensor(x, device="cpu").item() for x in (a, b))
        result = tensor.normal_(mean, std, generator=generator)
        while (rejected := (result < low) | (result > high)).any():
            result = torch.where(rejected, torch.empty_like(result).normal_(mean, std, generator=generator), result)
        return tensor.copy_(result)
    peak = (max(a, min(mean, b)) - mean) / std
    peak = -0.5 * (peak * peak)

    def is_rejected(x: Tensor) -> Tensor:
        log_density = over(x - mean, std).pow_(2).mul_(-0.5).sub_(peak)
        return torch.empty_like(x).uniform_(generator=generator).log_() > log_density

    result = tensor.uniform_(a, b, generator=generator)
    rejected = is_rejected(result)
    while rejected.any():
        drawn = torch.empty_like(result).uniform_(a, b, generator=generator)
        result = torch.where(rejected, drawn, result)
        rejected = rejected & is_rejected(drawn)
    return tensor.copy_(result)
