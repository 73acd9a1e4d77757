"""Replay the availability of spot machines with real kills and returns: goodput of Samebits and of other tools.

    python -m benchmarks.spot                                       # 4 machines, 3 minutes each, all tools
    python -m benchmarks.spot --seconds 600 --change-s 60 --seed 2 --tools Samebits DDP
    python -m benchmarks.spot --trace benchmarks/spot_p3.csv --trace-start-s 21000     # 72% up, 6 losses, 5 returns

Each machine of Samebits is a launcher with one process, `--nodes 1:N` with cluster.recovery=in_step. It is lost by
SIGKILL of both, without notice, and returns by the same command. Where the launchers meet at it, all others end, and
start again from the last checkpoint. Hand-written DDP, Lightning and Accelerate are killed
and started again by torchrun at each change, with as many processes as machines are up, from their last checkpoint. In
practice a program that watches the machines would do so. They save a checkpoint every ten steps.

All train the network of `tests/e2e/tiny_recipe.py` on its images with the same global batch. A step sleeps in
proportion to the samples of a process, so that processes on few cores are as fast as on machines of their own. Starts
are not: processes import torch and the tool on the same cores, which takes longer the more of them start together.

The trace is synthetic unless `--trace` names a recording (`spot_trace.py`). Both have a change of one machine each 20 s
on average. The synthetic one has 70% of the machines up. In `spot_p3.csv`, EC2 P3 machines over 11.4 hours, 75% are up,
and one of 32 changes each 2 minutes. The 4 machines of a replay stand for 8 each, and 1 s for 66 s.

Goodput is the number of samples in the result at the end of the trace, relative to undisturbed runs of the same tool on
as many machines for the same time; they are measured first. Samples of restarted tools count even if no checkpoint has
them. Samebits's run is then completed at full speed, and must have the weights of one process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.spot_tools import (
    GLOBAL_BATCH,
    LIMIT_S,
    SAMPLE_S,
    SCRIPTS,
    TOOLS,
    Restarted,
    Samebits,
    Tool,
    is_installed,
)
from benchmarks.spot_trace import (
    Change,
    batches,
    goodput,
    intervals,
    make_recorded_trace,
    make_trace,
    read_recording,
)


@dataclass(frozen=True)
class Replay:
    """What a job did in a trace.

    Attributes:
        samples: Samples in its result at the end of the trace.
        repeated: Steps that it computed again.
        weights: Hash of the completed run; only Samebits completes it.
    """

    samples: int
    repeated: int
    weights: str = ""


@contextmanager
def running(tool: Tool, first: list[Change]) -> Iterator[set[int]]:
    """Start the first machines of a trace, wait for three steps, and end all processes at the end."""
    up = {change.slot for change in first}
    try:
        tool.change(up, first)
        _until(tool, 3)  # by then what was read ahead is used up
        yield up
    finally:
        tool.close()


def measure_rate(tool: Tool, size: int, num_steps: int) -> tuple[float, float]:
    """Measure an undisturbed run.

    Returns:
        Samples per second over `num_steps` steps, and seconds from the start to the third step.
    """
    started = time.monotonic()
    with running(tool, [Change(0.0, slot, True) for slot in range(size)]):
        began, before = time.monotonic(), tool.steps()
        _until(tool, before + num_steps)
        return GLOBAL_BATCH * (tool.steps() - before) / (time.monotonic() - began), began - started


def replay(tool: Tool, trace: list[Change], seconds: float) -> Replay:
    """Play a trace from the third step on."""
    (_, first), *later = batches(trace)
    with running(tool, first) as up:
        began, before = time.monotonic(), tool.steps()
        for at_s, changes in later:
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            up ^= {change.slot for change in changes}
            tool.change(up, changes)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        samples = GLOBAL_BATCH * (tool.steps() - before)
        weights = tool.finish() if isinstance(tool, Samebits) else ""
        return Replay(samples, tool.repeated(), weights)


def num_steps(seconds: float, slots: int) -> int:
    """Return more steps than a run can take within a trace."""
    return int(seconds / (GLOBAL_BATCH * SAMPLE_S / slots)) + 20


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slots", type=int, default=4, choices=(1, 2, 3, 4), help="machines; any number of them divides the batch"
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="length of the trace")
    parser.add_argument("--availability", type=float, default=0.7, help="mean share of machines that are up, synthetic")
    parser.add_argument("--change-s", type=float, default=20.0, help="mean time between two changes")
    parser.add_argument("--seed", type=int, default=1, help="repeats a trace")
    parser.add_argument("--trace", type=Path, help="CSV file of a recorded trace: seconds,machines")
    parser.add_argument("--trace-start-s", type=float, default=0.0, help="where to begin in it, recorded seconds")
    parser.add_argument("--rate-steps", type=int, default=20, help="steps of an undisturbed run that are measured")
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument(
        "--peers-python", default=sys.executable, help="Python interpreter with lightning and accelerate"
    )
    parser.add_argument("--folder", type=Path, help="a new folder, with a short path, to keep the jobs' files in")
    given = parser.parse_args()
    if os.sep in given.peers_python:  # jobs run in other folders; the link itself, since it makes the environment
        given.peers_python = str(Path(given.peers_python).absolute())
    return given


def find_trace(given: argparse.Namespace) -> list[Change]:
    """Return the trace that the command line asks for, and print what it is like."""
    source = f"synthetic, {given.availability:.0%} up on average, seed {given.seed}"
    if given.trace is None:
        trace = make_trace(given.seed, given.slots, given.seconds, given.availability, given.change_s)
    else:
        trace, factor = make_recorded_trace(
            read_recording(given.trace), given.seed, given.slots, given.seconds, given.change_s, given.trace_start_s
        )
        source = f"{given.trace.name} from {given.trace_start_s:.0f} s on, 1 s stands for {factor:.0f} s"
    share = sum(length * up for length, up in intervals(trace, given.seconds)) / given.seconds / given.slots
    losses = sum(not change.is_up for change in trace)
    returns = sum(change.is_up and change.at_s > 0 for change in trace)
    print(f"trace: {source}")
    print(f"{given.slots} machines for {given.seconds:.0f} s: {share:.0%} up, {losses} losses, {returns} returns")
    return trace


def compare(given: argparse.Namespace, trace: list[Change], place: Path) -> bool:
    """Print a row for each tool; return whether Samebits's weights are those of one process."""
    rows, is_equal = [], True
    for tool in given.tools:
        script, package, requirement = SCRIPTS.get(tool, ("", "", ""))
        if package and not is_installed(package, given.peers_python):
            rows.append(f'| {tool} | skipped: not installed, pip install "{requirement}" | | |')
            continue

        def make(name: str, tool: str = tool, script: str = script) -> Tool:
            if tool == "Samebits":
                return Samebits(place / name, num_steps(given.seconds, given.slots))
            python = sys.executable if tool == "DDP" else given.peers_python
            return Restarted(place / name, script, python)

        sizes = sorted({up for _, up in intervals(trace, given.seconds)})
        rates = {}
        for size in sizes:
            rates[size], start_s = measure_rate(make(f"{tool}{size}"), size, given.rate_steps)
            print(
                f"{tool}, {size} undisturbed: {rates[size]:.0f} samples/s, third step after {start_s:.1f} s", flush=True
            )
        job = make(tool)
        done = replay(job, trace, given.seconds)
        share = goodput(done.samples, trace, given.seconds, rates.__getitem__)
        rows.append(f"| {tool} | {done.samples:,} | {done.repeated} | {share:.1%} |")
        print(rows[-1], flush=True)
        if isinstance(job, Samebits):
            is_equal = done.weights == job.alone()
    print("\n".join(["", "| | samples at the end | steps repeated | goodput |", "|---|---|---|---|", *rows]))
    if "Samebits" in given.tools:
        print(f"weights of Samebits: {'those of one process' if is_equal else 'DIFFERENT'}")
    return is_equal


def main() -> int:
    """Compare the tools; the exit code tells whether Samebits's weights are those of one process."""
    given = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trace = find_trace(given)
    with ExitStack() as stack:
        place = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="s")))
        place.mkdir(parents=True, exist_ok=given.folder is None)
        return 0 if compare(given, trace, place.absolute()) else 1


def _until(tool: Tool, step: int) -> None:
    end = time.monotonic() + LIMIT_S
    while tool.steps() < step:
        if time.monotonic() > end:
            raise RuntimeError(f"{type(tool).__name__} did not come to step {step}")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
