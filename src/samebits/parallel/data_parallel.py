"""torch.nn.DataParallel (`parallel=dp`), as a baseline for comparisons."""

from __future__ import annotations

import torch
from torch import nn

from samebits.cluster.world import World
from samebits.errors import ConfigError


def wrap_data_parallel(model: nn.Module, world: World) -> nn.Module:
    """Return a module that splits each micro-batch over all GPUs of this machine.

    Args:
        model: On the world's device.
        world: Of one process.

    Raises:
        ConfigError: There are several processes, or fewer than two GPUs.
    """
    if world.size > 1:
        raise ConfigError(f"parallel=dp is for one process, not {world.size}", fix="Set --procs 1 or parallel=ddp.")
    num_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if num_gpus < 2:
        raise ConfigError(
            f"parallel=dp needs two GPUs or more on this machine, not {num_gpus}", fix="Set parallel=ddp."
        )
    return nn.DataParallel(model)
