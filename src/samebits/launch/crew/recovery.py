"""Whether a run can continue in the step after the loss of a process (`cluster.recovery=in_step`), and if not, why."""

import glob
import math
import sys
from dataclasses import dataclass

from samebits.cluster.views.torch_traps import can_end_groups
from samebits.config.schema import RunConfig, first_met
from samebits.process_range import RendezvousConfig

# With in_step, a process that is stopped for this long is killed, as the others wait for it. Debuggers and
# `kill -STOP; kill -CONT` within it do no harm.
STOPPED_S = 0.3


@dataclass(frozen=True)
class Recovery:
    """What follows the loss of a process."""

    in_step: bool = False  #: The others continue. Otherwise all restart.
    stopped_s: float = math.inf  #: A process that is stopped (SIGSTOP) for this long is killed.
    why_restart: str = (
        ""  #: Why all restart, though `auto` prefers recovery in the step; else empty.
    )


def choose_recovery(
    config: RunConfig, nodes: RendezvousConfig | None, num_procs: int, max_restarts: int
) -> Recovery:
    """Return how a run recovers; if recovery in the step was configured and is not possible, print why."""
    chosen = config.cluster.recovery
    # On several machines it needs a shared disk, and some losses end the run that a restart survives (ADR 62).
    if chosen == "restart" or (chosen == "auto" and (nodes is not None or not max_restarts)):
        return Recovery()
    reason = why_restart(config, nodes, num_procs)
    if chosen == "auto":
        # A user may have stopped a process to look at it. `watch.hang_timeout_s` is the limit then: all restart.
        return Recovery(not reason, why_restart=reason)
    if reason:
        print(
            f"cluster.recovery=in_step does not work with {reason}: after the loss of a process, all restart",
            file=sys.stderr,
        )
        return Recovery()
    return Recovery(True, STOPPED_S)


def why_restart(config: RunConfig, nodes: RendezvousConfig | None, num_procs: int) -> str:
    """Return what prevents recovery in the step, so that a loss restarts all processes; empty if nothing does."""
    # Looked for without torch, since the launcher must not import it here: that takes seconds.
    has_gpus = config.device == "cuda" or (
        config.device == "auto" and bool(glob.glob("/dev/nvidia[0-9]*"))
    )
    if num_procs < 2 and nodes is None:
        return "one process"
    if has_gpus:
        return "GPUs"
    if not can_end_groups():
        return "a system that does not show a process its connections (/proc/self/fd)"
    return first_met(
        config,
        "cluster.backend=nccl",
        "batch_norm=sync",
        "watch.nonfinite!=stop",
        "record.content=true",
    )
