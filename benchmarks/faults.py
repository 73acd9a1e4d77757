"""Injected faults: how Samebits, hand-written DDP under torchrun, Lightning and Accelerate handle them.

    python -m benchmarks.faults --peers-python .venv/bench/bin/python
    python -m benchmarks.faults --only kill nan --tools Samebits
    python -m benchmarks.faults --recovery 5

One job for all: a small network on UCI digits, 2 processes on CPU, 6 epochs of 22 or 23 steps, a checkpoint per
epoch, 40 ms of sleep in each step. All are started with restarts allowed (torchrun and Samebits: --max-restarts 3).
Samebits's watch.hang_timeout_s is 15 s here; its default is 300 s. A command that has not ended --limit-s after the
fault is killed. `the same` compares the final weights with those of the tool's own run without a fault, after one
more start of the same command if it ended early. The whole benchmark takes about half an hour on 2 idle cores. `disk`
needs root, for a disk that can be filled; `cut` too, for two hosts with a link between them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.fault_jobs import Job, Outcome, Setting, commands, undisturbed
from benchmarks.fault_kinds import FAULTS
from benchmarks.fault_recovery import recovery

TOOLS = ("Samebits", "DDP by hand", "Lightning", "Accelerate")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers-python", default=sys.executable, help="Python interpreter with lightning and accelerate"
    )
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), help="faults to try; default: all")
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS)
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds to wait until a fault is detected")
    parser.add_argument(
        "--recovery", type=int, metavar="N", help="measure only the time from kill -9 to the next step, N times"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers_python = options.peers_python
    if os.sep in peers_python:
        peers_python = str(Path(peers_python).absolute())
    setting = Setting(peers_python, options.limit_s)
    with tempfile.TemporaryDirectory(prefix="faults-") as work:
        if options.recovery:
            print("\n".join(recovery(Path(work), options.recovery, setting)))
            return 0
        rows: list[tuple[str, str, Outcome]] = []
        wanted = {tool: undisturbed(tool, Path(work), setting) for tool in options.tools}
        for fault in options.only or list(FAULTS):
            for tool in options.tools:
                outcome = _one(fault, tool, Path(work), setting, wanted[tool])
                print(f"{fault:8} {tool:12} {outcome}", flush=True)
                rows.append((fault, tool, outcome))
    print("\n".join(["", *_table(rows)]))
    return 0


def _one(fault: str, tool: str, work: Path, setting: Setting, wanted: str) -> Outcome:
    folder = work / f"{list(FAULTS).index(fault)}-{TOOLS.index(tool)}"  # no word in it that might pass for news
    job = Job(tool, folder, setting, commands)
    try:
        return FAULTS[fault](job, wanted)
    except (TimeoutError, OSError, RuntimeError) as error:
        return Outcome(said=f"could not be tried: {error}")
    finally:
        job.end()


def _table(rows: list[tuple[str, str, Outcome]]) -> list[str]:
    lines = [
        "| fault | tool | noticed after | what is said first | exit code | next step after | steps again "
        "| processes left | the same weights |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return [*lines, *(f"| {fault} | {tool} | {' | '.join(outcome.cells())} |" for fault, tool, outcome in rows)]


if __name__ == "__main__":
    raise SystemExit(main())
