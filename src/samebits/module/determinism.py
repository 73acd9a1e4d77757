"""torch's switches for equal bits in every run."""

import os

import torch

from samebits.config.schema import RunConfig
from samebits.launch.kernels import has_effect, too_late
from samebits.module.deterministic_forms import use_deterministic_forms
from samebits.portable.arithmetic import use_portable_arithmetic


def use_deterministic_algorithms(config: RunConfig, device: torch.device) -> None:
    """Set the number of threads and, in exact mode, deterministic kernels.

    Kernels split their sums by the number of threads, so that number belongs to the run and not to the machine. An
    operation without a deterministic kernel raises an error with its name.
    """
    set_kernels(config.num_threads, device, exact=config.mode == "exact")
    use_portable_arithmetic(config.kernels == "portable")


def set_kernels(num_threads: int, device: torch.device, *, exact: bool) -> None:
    """Set torch's switches, as `use_deterministic_algorithms` does for the settings of a run."""
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(exact)
    # Filling fresh memory only protects against reading it by mistake, and costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's types
    # Its choice of kernels follows from measured times, so it can differ from run to run.
    torch.backends.cudnn.benchmark = not exact
    torch.backends.cudnn.deterministic = exact
    use_deterministic_forms(exact and device.type == "cuda")
    if exact and device.type == "cuda":
        # cuBLAS reads it at its first call. Without it, torch refuses matrix products in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def check_kernels(config: RunConfig) -> None:
    """Check that torch uses the kernels of `kernels`, which it chooses at its first computation.

    Raises:
        ConfigError: It has computed before the settings were known.
    """
    if not has_effect(config.kernels):
        raise too_late(config.kernels)
