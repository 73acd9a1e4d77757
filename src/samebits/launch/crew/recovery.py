"""Whether a run can continue in the step after the loss of a process (`cluster.recovery=in_step`), and if not, why."""

import glob
import sys

from samebits.cluster.views.torch_traps import can_end_groups
from samebits.config.combinations import first_met
from samebits.config.process_range import RendezvousConfig
from samebits.config.schema import RunConfig


def recovers_in_step(config: RunConfig, nodes: RendezvousConfig | None, num_procs: int) -> bool:
    """Return whether a run recovers in the step; if that was configured and is not possible, print why.

    Args:
        nodes: The other machines; None: this one only.
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
        nodes: The other machines; None: this one only.
    """
    # Looked for without torch, since the launcher must not import it here: that takes seconds.
    has_gpus = config.device == "cuda" or (config.device == "auto" and bool(glob.glob("/dev/nvidia[0-9]*")))
    if num_procs < 2 and nodes is None:
        return "one process"
    if has_gpus:
        return "GPUs"
    if not can_end_groups():
        return "a system that does not show a process its connections (/proc/self/fd)"
    # The backend is one of auto, gloo, nccl and mpi.
    return first_met(
        config,
        "cluster.backend=nccl",
        "cluster.backend=mpi",
        "mode!=exact",
        "parallel!=ddp",
        "batch_norm=sync",
        "watch.recheck",
        "watch.nonfinite!=stop",
        "record.content=true",
    )
