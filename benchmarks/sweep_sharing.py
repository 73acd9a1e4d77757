"""What a sweep saves by training equal first steps once, and whether kills change its table.

    python -m benchmarks.sweep_sharing [--trials 16] [--epochs 160] [--kills 10]

The trials part after half of the training: they differ in the factor of the learning rate from then on. The sweep runs
with and without sharing, and all hashes are compared. Then it is killed with signal 9 at random moments and resumed
after each, and its table is compared with that of the undisturbed sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMEBITS = [sys.executable, "-P", "-m", "samebits"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    gammas = ",".join(f"{0.9 ** (number + 1):.4f}" for number in range(given.trials))
    common = [
        "device=cpu",
        f"epochs={given.epochs}",
        "optim.schedule=multi_step",
        f"eval_every={given.epochs // 2} epochs",
    ]
    command = ["digits", *common, f"optim.milestones=[{given.epochs // 2}]", "--grid", f"optim.gamma={gammas}"]
    command += ["--jobs", str(given.jobs)]
    with tempfile.TemporaryDirectory(prefix="samebits-sweep-") as place:
        folder = Path(place)
        shared_s, shared_cpu = run([*command, "--sweep-dir", str(folder / "shared")])
        alone_s, alone_cpu = run([*command, "--sweep-dir", str(folder / "alone"), "--no-share"])
        shared, alone = table(folder / "shared"), table(folder / "alone")
        print(f"{given.trials} trials of {given.epochs} epochs that part after half, {given.jobs} side by side")
        print(f"  without sharing  {alone_s:7.0f} s   CPU {alone_cpu:7.0f} s")
        print(f"  with sharing     {shared_s:7.0f} s   CPU {shared_cpu:7.0f} s")
        print(f"  saved            {1 - shared_s / alone_s:7.0%}         {1 - shared_cpu / alone_cpu:7.0%}")
        print(f"  hashes           {'equal' if shared == alone else 'DIFFERENT'}")
        is_same = kill(folder / "killed", command, given.kills, shared_s, given.seed) == shared if given.kills else True
        if given.kills:
            print(f"  {given.kills} kills         {'same table' if is_same else 'ANOTHER TABLE'}")
    raise SystemExit(0 if shared == alone and is_same else 1)


def run(command: list[str]) -> tuple[float, float]:
    """Return the seconds of a sweep, and those of the processors."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*SAMEBITS, "sweep", *command], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu_s


def table(folder: Path) -> list[dict[str, Any]]:
    """Return the trials of a sweep without times, and without where their steps were trained."""
    done = subprocess.run([*SAMEBITS, "sweep", str(folder), "--show", "--json"], capture_output=True, check=True)
    return [
        {name: trial[name] for name in trial if name not in ("took_s", "shared")}
        for trial in json.loads(done.stdout)["trials"]
    ]


def kill(folder: Path, command: list[str], num_kills: int, whole_s: float, seed: int) -> list[dict[str, Any]]:
    """Return the table of a sweep that is killed at random moments of its whole time, and resumed each time."""
    draw = random.Random(seed)
    for number in range(num_kills + 1):
        is_new = not (folder / "sweep.json").exists()
        arguments = [*command, "--sweep-dir", str(folder)] if is_new else [str(folder)]
        process = subprocess.Popen([*SAMEBITS, "sweep", *arguments], stdout=subprocess.DEVNULL)
        if number == num_kills:
            assert process.wait() == 0
            break
        while not (folder / "sweep.json").exists():
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 2 * whole_s / num_kills))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return table(folder)


if __name__ == "__main__":
    main()
