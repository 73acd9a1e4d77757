"""What `samebits diff` finds of fifty planted differences between two runs.

    python -m benchmarks.diff_faults
    python -m benchmarks.diff_faults --only momentum "label of"

Each row trains two runs of 40 steps in this process, the second one with a difference, and compares them. `step` and
`module` are right if they are those where the difference was planted; where a run does not repeat its own record, no
replay can show the module. The bar is 50 of 50 steps and 45 of 50 modules, with at most 2 log2(40) = 10.6 replays each.
Takes about two minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

from samebits.replay.diff import RunDifference
from tests.diff_trials.faults import faults
from tests.diff_trials.runs import NUM_STEPS, Fault, Trials


def main() -> int:
    """Print the table, and return whether the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="differences whose names contain one of these")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if any(text in fault.name for text in options.only)]
    num_steps = num_places = most = 0
    print(f"{'difference':<42} {'step':<8} {'module':<8} {'replays':>7} {'seconds':>8}  found")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        trials = Trials(Path(folder))
        for number, fault in enumerate(chosen):
            started = time.perf_counter()
            found = trials.compare(fault, number)
            seconds = time.perf_counter() - started
            has_step, has_place = is_step_found(fault, found), is_place_found(fault, found)
            where = found.location
            replays = where.num_replays if where is not None else 0
            num_steps, num_places, most = num_steps + has_step, num_places + has_place, max(most, replays)
            text = "-" if where is None else f"{where.step}, {where.phase}: {where.module}, {where.element}"
            print(
                f"{f'{fault.kind}: {fault.name}':<42.42} {_mark(has_step):<8} {_mark(has_place):<8} {replays:>7} "
                f"{seconds:>8.2f}  {text}{found.problem}",
                flush=True,
            )
    print(f"{num_steps} of {len(chosen)} steps, {num_places} modules, at most {most} replays")
    return int(num_steps < len(chosen) or num_places < 0.9 * len(chosen) or most > 2 * math.log2(NUM_STEPS))


def is_step_found(fault: Fault, found: RunDifference) -> bool:
    """Whether a comparison found the step of a planted difference."""
    if fault.step is None:
        return found.location is None and found.folders.step is None and bool(found.folders.versions)
    return found.location is not None and found.location.step == fault.step


def is_place_found(fault: Fault, found: RunDifference) -> bool:
    """Whether a comparison found the module of a planted difference."""
    where = found.location
    return bool(fault.place) and where is not None and fault.place in f"{where.phase}: {where.module}"


def _mark(is_right: bool) -> str:
    return "right" if is_right else "-"


if __name__ == "__main__":
    raise SystemExit(main())
