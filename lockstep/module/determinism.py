"""torch's switches for equal bits in every run."""

from __future__ import annotations

import os

import torch

from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError


def use_deterministic_algorithms(config: RunConfig, device: torch.device) -> None:
    """Set the number of threads and, in exact mode, deterministic kernels.

    Kernels split their sums by the number of threads, so that number belongs to the run and not to the machine. An
    operation without a deterministic kernel raises an error with its name.
    """
    torch.set_num_threads(config.num_threads)
    exact = config.mode == "exact"
    torch.use_deterministic_algorithms(exact)
    # Filling fresh memory only protects against reading it by mistake, and costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's types
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    if exact and device.type == "cuda":
        # cuBLAS reads it at its first call. Without it, torch refuses matrix products in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_kernels(config: RunConfig) -> None:
    """Check that torch uses the kernels of `kernels`, which it chooses when it is imported.

    Raises:
        ConfigError: It was imported before the settings were known.
    """
    wanted = {"avx2": "AVX2", "portable": "DEFAULT"}.get(config.kernels)
    found = torch.backends.cpu.get_cpu_capability()
    if wanted not in (None, found):
        raise ConfigError(
            f"kernels={config.kernels} has no effect in this process, which uses {found} kernels",
            cause="torch was imported, or Lockstep's processes were started, before the setting was known.",
            fix="Train with the command or lockstep.train, which start processes of their own, or set kernels=auto.",
        )
