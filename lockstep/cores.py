"""How many CPU cores this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Count the CPU cores this process may run on.

    That is its affinity mask where the system has one (Linux: `taskset`, Slurm, cpusets), and all of the machine's
    cores elsewhere (macOS).
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
