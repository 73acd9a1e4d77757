"""Torch's own switches for the same bits on every run."""

from __future__ import annotations

import os

import torch

from lockstep.config.schema import RunConfig


def use_deterministic_algorithms(config: RunConfig, device: torch.device) -> None:
    """Set threads and, in exact mode, deterministic kernels. An operation that has none raises an error by its name.

    Kernels split their sums by the number of threads, so that number is part of the run, not of the machine.
    """
    torch.set_num_threads(config.num_threads)
    exact = config.mode == "exact"
    torch.use_deterministic_algorithms(exact)
    # Filling fresh memory would only help against reading it by mistake, and costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's types
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    if exact and device.type == "cuda":
        # Read by cuBLAS at its first call; torch refuses matrix products in deterministic mode without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
