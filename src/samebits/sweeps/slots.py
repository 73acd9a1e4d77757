"""Places for trials side by side: which cores and GPUs each one uses."""

import glob
import os
from dataclasses import dataclass

from samebits.config.schema import RunConfig
from samebits.cores import core_ids, num_cores
from samebits.errors import ConfigError

MAX_JOBS = 1024


@dataclass(frozen=True)
class Slot:
    """A place for one trial at a time."""

    cores: frozenset[int] = frozenset()  #: The CPU cores that its processes may use; empty: all of this process's.
    gpus: str | None = None  #: Value of CUDA_VISIBLE_DEVICES; None: as for this process.


def make_slots(jobs: int | None, procs: int, config: RunConfig) -> list[Slot]:
    """Divide this machine's cores and GPUs.

    Args:
        jobs: Number of trials side by side; None: as many as there are GPUs, or cores, for their processes.

    Raises:
        ConfigError: There are too few GPUs.
    """
    gpus = visible_gpus() if config.device != "cpu" else []
    if gpus:
        num_slots = jobs or max(1, len(gpus) // procs)
        if num_slots * procs > len(gpus):
            raise ConfigError(
                f"{num_slots} trials of {procs} process{'es' if procs > 1 else ''} need {num_slots * procs} GPUs, and "
                f"this machine has {len(gpus)}",
                fix=f"Set --jobs {max(1, len(gpus) // procs)}, or fewer --procs.",
            )
    else:
        num_slots = jobs or max(1, num_cores() // (procs * config.num_threads))
    cores = sorted(core_ids())
    share = len(cores) // num_slots
    # Without cores of their own, each trial would start DataLoader workers for all cores.
    is_divided = num_slots > 1 and share > 0
    return [
        Slot(
            frozenset(cores[index * share : (index + 1) * share]) if is_divided else frozenset(),
            ",".join(gpus[index * procs : (index + 1) * procs]) if gpus else None,
        )
        for index in range(num_slots)
    ]


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Does not import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return [str(number) for number in range(len(glob.glob("/dev/nvidia[0-9]*")))]
