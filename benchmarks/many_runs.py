"""How long `samebits runs`, `compare` and `report` take on 1,000 run folders.

    python -m benchmarks.many_runs [--runs 1000]

Writes run folders of 3 epochs as tests do, then times whole commands: the first listing, which reads everything, and
the following ones, which use the cache.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.unit.run_views.folders import make_run

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    num_runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory(prefix="samebits-runs-") as folder:
        runs = Path(folder) / "runs"
        for number in range(num_runs):
            make_run(runs / f"run-{number:05}", lr=0.001 * (number + 1), top1=0.5 + number / (3 * num_runs))
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache"}
        a, b = str(runs / "run-00000"), str(runs / "run-00001")
        commands = {
            "runs": ["runs", str(runs)],
            "runs --where --sort": ["runs", str(runs), "--where", "optim.lr>0.5", "--sort", "top1"],
            "compare, 2 runs": ["compare", a, b],
            "report, 1 run": ["report", a, "--out", f"{folder}/report.html"],
        }
        print(f"{num_runs} runs, seconds of the whole command: median (least), and its CPU time")
        seconds, cpu_s = _time(commands["runs"], environment)
        print(f"  first listing         {seconds:.2f}         CPU {cpu_s:.2f}")
        for name, command in commands.items():
            times = [_time(command, environment) for _ in range(REPEATS)]
            (seconds, cpu_s), least = (statistics.median(each) for each in zip(*times, strict=True)), min(times)[0]
            print(f"  {name:<20}  {seconds:.2f} ({least:.2f})  CPU {cpu_s:.2f}")


def _time(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of a command, and those of the processor, which other programs do not lengthen as much."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "samebits", *arguments], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu_s


if __name__ == "__main__":
    main()
