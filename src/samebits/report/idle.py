"""Report processes that have no micro-batch in a step."""

from samebits.data.micro_batches import num_micro_batches


def idle_row(num_procs: int, batch: int, micro_batch: int) -> str:
    """Describe how many processes are idle, and which micro_batch would use all of them; empty if none is idle."""
    num_micro = num_micro_batches(batch, micro_batch)
    if num_micro >= num_procs:
        return ""
    num_idle = num_procs - num_micro
    what = (
        f"{num_idle} of {num_procs} processes {'are' if num_idle > 1 else 'is'} idle: "
        f"a step has {num_micro} micro-batch{'es' if num_micro > 1 else ''}"
    )
    # The largest micro_batch with at least one micro-batch per process: ceil(batch / most) >= num_procs.
    most = (batch - 1) // (num_procs - 1)
    cure = (
        f"micro_batch={most} gives all of them work (and changes the result)"
        if most
        else f"no micro_batch gives all of them work: a step has {batch} sample{'s' if batch > 1 else ''}"
    )
    return f"{what}\n{cure}"
