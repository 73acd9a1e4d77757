"""torch's DataParallel, to be compared with (`parallel=dp`)."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.cluster.world import World
from lockstep.errors import ConfigError


def wrap_data_parallel(model: nn.Module, world: World) -> nn.Module:
    """What training calls in place of the model: each micro-batch is cut over all GPUs of this machine.

    Args:
        model: On the world's device.
        world: One process.

    Raises:
        ConfigError: There are several processes, or fewer than two GPUs.
    """
    if world.size > 1:
        raise ConfigError(f"parallel=dp is for one process, and there are {world.size}", fix="--procs 1")
    num_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if num_gpus < 2:
        raise ConfigError(
            f"parallel=dp needs two GPUs or more on this machine, and the run has {num_gpus}", fix="parallel=ddp"
        )
    return nn.DataParallel(model)
