"""The first steps of a launched script, as each rank has them, for `samebits check SCRIPT --as N`."""

import json
from pathlib import Path

from torch import Tensor

from samebits.parallel.checksum import checksums

_STEPS: list[dict[str, int]] = []  # of this process


def write_trace(trace: str, rank: int, step: int, state: dict[str, Tensor]) -> bool:
    """Note the weights, of any shape, after a step; return whether it was the last one.

    Args:
        trace: FOLDER:STEPS.
        step: How many steps were made.
    """
    folder, _, num_steps = trace.rpartition(":")
    _STEPS.append(checksums(state))
    if step < int(num_steps):
        return False
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(_STEPS), encoding="utf-8")
    return True
