"""The faults of benchmarks/faults.py, one function each: cause it, observe, resume if possible, compare."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

from benchmarks.fault_jobs import Job, Outcome

# In the middle of the second epoch.
STEP = 35


def kill(job: Job, wanted: str) -> Outcome:
    """kill -9 of rank 1, with restarts allowed."""
    job.start()
    job.until_step(STEP)
    job.mark()
    os.kill(job.rank_pid(1), signal.SIGKILL)
    outcome = job.follow(limit_s=2 * job.setting.limit_s)
    return job.compare(outcome, wanted)


def stop(job: Job, wanted: str) -> Outcome:
    """SIGTERM to the command, as a scheduler sends it; then the same command again."""
    job.start()
    job.until_step(STEP)
    before = job.step()
    job.mark()
    job.processes[0].send_signal(signal.SIGTERM)
    outcome = job.follow()
    job.end()
    return job.go_on(outcome, wanted, max(before, job.step()))


def hang(job: Job, wanted: str) -> Outcome:
    """SIGSTOP of rank 1."""
    job.start()
    job.until_step(STEP)
    job.mark()
    os.kill(job.rank_pid(1), signal.SIGSTOP)
    outcome = job.follow()
    return job.compare(outcome, wanted)


def nan(job: Job, wanted: str) -> Outcome:
    """Rank 1's images of one step are NaN."""
    job.start(fault="nan")
    job.until_step(STEP)
    job.mark()
    outcome = job.follow()
    if not job.final():
        outcome.remark = "stopped before"
        return outcome
    outcome = job.compare(outcome, wanted)
    if job.tool != "Samebits":
        finite = '"finite": true' in (job.folder / "final-0.json").read_text()
        outcome.remark = "" if finite else "no: every weight ruined"
    return outcome


def model(job: Job, wanted: str) -> Outcome:
    """Rank 1 has a wider network."""
    job.start(fault="model")
    job.mark()
    return _from_the_start(job)


def lr(job: Job, wanted: str) -> Outcome:
    """Rank 1 has another learning rate."""
    job.start("two" if job.tool == "Samebits" else "one", fault="lr")
    job.mark()
    return _from_the_start(job)


def missing(job: Job, wanted: str) -> Outcome:
    """One of two ranks is never started."""
    job.start("first")
    job.mark()
    outcome = job.follow()
    outcome.remark = "never started"
    return outcome


def torn(job: Job, wanted: str) -> Outcome:
    """Kill everything, cut the largest file of the newest checkpoint in half, and run the same command again."""
    job.start()
    job.until_step(STEP + 25)
    job.end()
    if job.tool == "Samebits":
        newest = sorted((job.data / "run" / "checkpoints").glob("step-*"))[-1]
    elif job.tool == "Accelerate":
        newest = sorted((job.data / "checkpoints").glob("checkpoint_*"))[-1]
    else:
        newest = job.data
    largest = max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    job.start()
    job.mark()
    outcome = job.follow(limit_s=2 * job.setting.limit_s)
    outcome.next_step_s = None
    outcome.redone = outcome.redone if outcome.code == 0 else None
    return job.compare(outcome, wanted)


def disk(job: Job, wanted: str) -> Outcome:
    """Fill the disk of the run; then free it, and run the same command again."""
    if os.geteuid() != 0:
        raise RuntimeError("needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(job.data)], check=True)
    try:
        job.start()
        job.until_step(STEP)
        before = job.step()
        job.mark()
        filler = job.data / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        outcome = job.follow()
        job.end()
        filler.unlink()
        return job.go_on(outcome, wanted, before)
    finally:
        job.end()
        time.sleep(0.5)
        subprocess.run(["umount", "-l", str(job.data)], check=False)


def cut(job: Job, wanted: str) -> Outcome:
    """Cut the link between two hosts; after the end, restore it and run the same command again."""
    from tests.cluster import hosts as network  # from the checkout, and only for this fault

    if reason := network.why_not():
        raise RuntimeError(reason)
    with network.hosts(2, job.folder) as (first, second):
        job.make = _on_two_hosts
        wrap: Callable[[int, list[str]], list[str]] = lambda number, command: (first, second)[number].command(command)  # noqa: E731  # typed
        job.start(wrap=wrap)
        job.until_step(STEP)
        job.mark()
        second.cut()
        outcome = job.follow()
        job.end()
    outcome.remark = "stopped before" if outcome.code is not None else "still waiting"
    return outcome


def _on_two_hosts(tool: str, job: Job, form: str) -> list[list[str]]:
    from benchmarks.fault_jobs import commands

    commands_of_one = commands(tool, job, "one")[0]
    if tool == "Samebits":
        place = commands_of_one.index("--procs")
        base = [*commands_of_one[:place], "--procs", "1", "--nodes", "2", "--rdzv-endpoint", "n1:29410"]
        return [base, base]
    place = commands_of_one.index("--standalone")
    nodes = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:29410"]
    base = [*commands_of_one[:place], *nodes, commands_of_one[-1]]
    return [base, base]


def _from_the_start(job: Job) -> Outcome:
    outcome = job.follow()
    if outcome.code is None:
        outcome.remark = "still running"
    elif not job.final():
        outcome.remark = "never started"
    elif job.ranks_differ():
        outcome.remark = "ranks end with different weights"
    else:
        outcome.remark = "ran through"
    return outcome


FAULTS: dict[str, Callable[[Job, str], Outcome]] = {
    "kill": kill, "stop": stop, "hang": hang, "nan": nan, "disk": disk, "torn": torn, "missing": missing,
    "model": model, "lr": lr, "cut": cut,
}  # fmt: skip
