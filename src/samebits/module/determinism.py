"""torch's switches for equal bits in every run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from samebits.portable.arithmetic import use_portable_arithmetic
from samebits.portable.images import grid_sampler_2d_backward
from samebits.portable.mode import converting
from samebits.portable.table import HANDLERS

if TYPE_CHECKING:
    from samebits.config.schema import RunConfig

# Deterministic forms of operations that torch refuses on a GPU in deterministic mode.
#
# torch's kernels of them add atomically, in no defined order. The forms of portable arithmetic add integers, exactly,
# so the order does not matter. They replace the kernels below autograd, so that all other operations cost what they
# did.


_BILINEAR = 0
_ZEROS = 0


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


def use_deterministic_algorithms(config: RunConfig, device: torch.device) -> None:
    """Set the number of threads and deterministic kernels.

    Kernels split their sums by the number of threads, so that number belongs to the run and not to the machine. An
    operation without a deterministic kernel raises an error with its name.
    """
    set_kernels(config.num_threads, device)
    use_portable_arithmetic(config.kernels == "portable")


def set_kernels(num_threads: int, device: torch.device) -> None:
    """Set torch's switches, as `use_deterministic_algorithms` does for the settings of a run."""
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only protects against reading it by mistake, and costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's types
    # Its choice of kernels follows from measured times, so it can differ from run to run.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    use_deterministic_forms(device.type == "cuda")
    if device.type == "cuda":
        # cuBLAS reads it at its first call. Without it, torch refuses matrix products in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
