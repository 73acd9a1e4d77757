"""Errors that end a run on several machines."""

from samebits.config.process_range import ProcessRange, RendezvousConfig
from samebits.errors import LaunchError

FIX = "Resume the run with --resume auto on all machines."


def too_few_nodes(num_nodes: int, size: ProcessRange, lost: set[int]) -> LaunchError:
    """Return the error of a run that has lost more nodes than it can do without. `size`: how many the run may have."""
    return LaunchError(
        f"{num_nodes} of {size} nodes remain",
        given=f"lost: {', '.join(f'node {node}' for node in sorted(lost))}",
        fix=f"{FIX} With --nodes MIN:MAX, a run continues down to MIN machines.",
    )


def gave_up_waiting(nodes: RendezvousConfig, given: str, cause: str = "") -> LaunchError:
    """Return the error of a run that too few launchers have joined in time; `cause`: why one was refused."""
    return LaunchError(
        f"gave up waiting for {nodes.size.least} nodes at {nodes.endpoint}",
        given=given,
        where=f"after {nodes.join_timeout_s:.0f} s (cluster.join_timeout_s)",
        cause=cause,
        fix="Start the same command on the missing machines.",
    )
