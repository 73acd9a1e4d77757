"""Deterministic forms of operations that torch refuses on a GPU in deterministic mode.

torch's kernels of them add atomically, in no defined order. The forms of portable arithmetic add integers, exactly, so
the order does not matter. They replace the kernels below autograd, so that all other operations cost what they did.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samebits.portable.mode import converting
from samebits.portable.operations.resizing import grid_sampler_2d_backward
from samebits.portable.table import HANDLERS

_BILINEAR, _ZEROS = 0, 0


def _of_cudnn(x: Tensor, grid: Tensor, g: Tensor) -> tuple[Tensor | None, Tensor]:
    return grid_sampler_2d_backward(g, x, grid, _BILINEAR, _ZEROS, True, (True, True))


# The gradients of cuDNN's sampling have no defined order either, and torch does not refuse them.
FORMS = {"cudnn_grid_sampler_backward": _of_cudnn} | {
    name: HANDLERS[name]
    for name in (
        "_adaptive_avg_pool2d_backward", "grid_sampler_2d_backward", "nll_loss2d_backward", "nll_loss2d_forward",
        "upsample_bicubic2d_backward", "upsample_bilinear2d_backward",
    )
}  # fmt: skip

_library: torch.library.Library | None = None


def use_deterministic_forms(on: bool, key: str = "CUDA") -> None:
    """Replace torch's kernels of these operations with this dispatch key, or bring them back."""
    global _library
    if not on:
        _library = None  # removes what it registered
    elif _library is None:
        _library = torch.library.Library("aten", "IMPL")
        for name, form in FORMS.items():
            operation = getattr(torch.ops.aten, name).default
            _library.impl(name, converting(operation, form, _refused), key)


def _refused(name: str) -> RuntimeError:
    # torch's words, which `samebits check` looks for.
    return RuntimeError(f"{name} with these arguments does not have a deterministic implementation")
