"""Time from kill -9 of a rank to the next step, for benchmarks/faults.py --recovery."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.fault_jobs import Job, Setting, commands


def recovery(work: Path, times: int, setting: Setting) -> list[str]:
    """Measure the time from kill -9 of a rank to the next step, by part."""
    names = ("said by the launcher", "new processes begun", "run folder opened", "next step done")
    rows: list[list[float]] = []
    for number in range(times):
        job = Job("Samebits", work / f"recovery-{number}", setting, commands)
        try:
            job.start()
            job.until_step(20 + 7 * number)
            old, before = {job.rank_pid(0), job.rank_pid(1)}, job.step()
            job.mark()
            os.kill(job.rank_pid(number % 2), signal.SIGKILL)
            rows.append(_stages(job, old, before))
            print(f"CPU time of rank 0 until then: {_cpu_s(_pid(job)):.2f} s", flush=True)
            print("  ".join(f"{name} {at:.2f} s" for name, at in zip(names, rows[-1], strict=True)), flush=True)
        finally:
            job.end()
            shutil.rmtree(job.folder, ignore_errors=True)  # its last process may still write there
    head = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    worst = [max(column) for column in zip(*rows, strict=True)]
    return [
        *head,
        *(
            f"| {name} of {times} | {' | '.join(f'{at:.2f} s' for at in row)} |"
            for name, row in (("median", middle), ("worst", worst))
        ),
    ]


def _stages(job: Job, old: set[int], before: int) -> list[float]:
    stages: list[float] = []
    tests: list[Callable[[], bool]] = [
        lambda: "was killed by signal 9" in job.text()[job.said_before :],
        lambda: "restart 1 of" in job.text()[job.said_before :],
        lambda: bool({_pid(job)} - old - {0}),
        lambda: 0 < job.step() < before or job.step() > before + 1,
    ]
    while tests:
        if tests[0]():
            stages.append(time.time() - job.fault_at)
            tests.pop(0)
        elif time.time() > job.fault_at + 60:
            raise SystemExit(f"did not come back: {job.text()[-1000:]}")
        time.sleep(0.005)
    return stages


def _cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return float("nan")


def _pid(job: Job) -> int:
    with contextlib.suppress(RuntimeError):
        return job.rank_pid(0)
    return 0
