"""Pooling, padding, resizing and convolutions over one to three dimensions, against torch's own in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.unit.portable.against_torch import check_against_torch

GENERATOR = torch.Generator().manual_seed(0)
VALUES = {d: torch.randn(2, 4, *[7, 6, 5][:d], generator=GENERATOR) for d in (1, 2, 3)}
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def weights(*size: int) -> Tensor:
    return torch.randn(*size, generator=GENERATOR)


Operation = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def over(d: int) -> dict[str, Operation]:
    """Operations over d dimensions."""
    x, whole = (VALUES[d],), {"ceil_mode": True, "padding": 1}

    def of(name: str) -> Any:
        return getattr(F, f"{name}{d}d")

    convolve = partial(of("conv"), stride=2, padding=1, dilation=2)
    turned = partial(of("conv_transpose"), stride=2, padding=1, output_padding=1)
    return {
        "convolution": (convolve, (x[0], weights(3, 4, *[3, 2, 2][:d]), weights(3))),
        "grouped": (partial(of("conv"), groups=2), (x[0], weights(6, 2, *[2, 3, 1][:d]))),
        "transposed": (turned, (x[0], weights(4, 3, *[3, 2, 2][:d]), weights(3))),
        "grouped transposed": (partial(of("conv_transpose"), groups=2), (x[0], weights(4, 3, *[2] * d))),
        "max": (partial(of("max_pool"), kernel_size=3, stride=2, padding=1), x),
        "average": (partial(of("avg_pool"), kernel_size=2), x),
        "average at the edge": (partial(of("avg_pool"), kernel_size=3, stride=2, **whole), x),
        "average inside": (partial(of("avg_pool"), kernel_size=3, stride=2, count_include_pad=False, **whole), x),
        "average of one sample": (partial(of("avg_pool"), kernel_size=3, stride=2, **whole), (x[0][0],)),
        "adaptive average": (partial(of("adaptive_avg_pool"), output_size=3), x),
        "adaptive average of one sample": (partial(of("adaptive_avg_pool"), output_size=3), (x[0][0],)),
        "adaptive max": (partial(of("adaptive_max_pool"), output_size=3), x),
        "lp": (partial(of("lp_pool"), norm_type=2, kernel_size=2), (x[0].abs() + 0.1,)),
        **{
            f"{mode} padding": (partial(F.pad, pad=[1, 2, 2, 1, 0, 1][: 2 * d], mode=mode), x)
            for mode in ("reflect", "replicate", "circular", "constant")
        },
        **{
            f"{mode} by {scale}": (partial(F.interpolate, scale_factor=scale, mode=mode), x)
            for mode in ("nearest", "nearest-exact", MODES[d], "area")
            for scale in (1.6, 0.6)
        },
    }


OPERATIONS: dict[str, Operation] = {f"{name}, {d}": each for d in (1, 2, 3) for name, each in over(d).items()} | {
    "unfold": (partial(F.unfold, kernel_size=3, padding=1), (VALUES[2],)),
    "fold": (partial(F.fold, output_size=(7, 6), kernel_size=2), (weights(2, 8, 30),)),
    "unfold of a tensor": (lambda x: x.unfold(2, 3, 2), (VALUES[1],)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    check_against_torch(*OPERATIONS[name], tolerance=4e-5)
