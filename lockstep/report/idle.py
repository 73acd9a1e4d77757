"""Processes that a step has no work for."""

from __future__ import annotations


def idle_row(num_procs: int, batch: int, micro_batch: int) -> str:
    """How many processes have nothing to do, and what would give all of them work; empty if they have.

    Args:
        num_procs: Processes.
        batch: Samples of a step.
        micro_batch: The most samples of a forward pass.
    """
    num_micro = -(-batch // micro_batch)
    if num_micro >= num_procs:
        return ""
    num_idle = num_procs - num_micro
    what = (
        f"{num_idle} of {num_procs} processes {'have' if num_idle > 1 else 'has'} nothing to do: "
        f"{num_micro} {'are' if num_micro > 1 else 'is'} enough"
    )
    # The largest one that cuts the step into as many parts as there are processes: ceil(batch / most) >= num_procs.
    most = (batch - 1) // (num_procs - 1)
    cure = (
        f"micro_batch={most} gives all of them work (another run: other bits)"
        if most
        else f"no micro_batch gives all of them work: a step has {batch} sample{'s' if batch > 1 else ''}"
    )
    return f"{what}\n{cure}"
