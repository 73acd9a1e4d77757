"""Whether a run can continue in the step after the loss of a process (`cluster.recovery=in_step`), and if not, why."""

from __future__ import annotations

import glob
import sys

from samebits.config.process_range import RendezvousConfig
from samebits.config.schema import RunConfig


def recovers_in_step(config: RunConfig, nodes: RendezvousConfig | None, num_procs: int) -> bool:
    """Return whether a run recovers in the step; if that was configured and is not possible, print why.

    Args:
        config: The settings.
        nodes: The other machines; None: this one only.
        num_procs: Number of processes.
    """
    if config.cluster.recovery != "in_step":
        return False
    reason = why_restart(config, nodes, num_procs)
    if reason:
        print(
            f"cluster.recovery=in_step does not work with {reason}: after the loss of a process, all restart",
            file=sys.stderr,
        )
    return not reason


def why_restart(config: RunConfig, nodes: RendezvousConfig | None, num_procs: int) -> str:
    """Return what prevents recovery in the step, so that a loss restarts all processes; empty if nothing does.

    Args:
        config: The settings.
        nodes: The other machines; None: this one only.
        num_procs: Number of processes.
    """
    has_gpus = config.device == "cuda" or (config.device == "auto" and bool(glob.glob("/dev/nvidia[0-9]*")))
    obstacles = {
        "one process": num_procs < 2 and nodes is None,
        "GPUs": has_gpus,
        f"cluster.backend={config.cluster.backend}": config.cluster.backend not in ("auto", "gloo"),
        f"mode={config.mode}": config.mode != "exact",
        f"parallel={config.parallel}": config.parallel != "ddp",
        "batch_norm=sync": config.batch_norm == "sync",
        "watch.recheck": config.watch.recheck is not None,
        f"watch.nonfinite={config.watch.nonfinite}": config.watch.nonfinite != "stop",
        "record.content=true": config.record.content,
    }
    return next((name for name, is_there in obstacles.items() if is_there), "")
