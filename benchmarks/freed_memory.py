"""Step time on a CPU if glibc decides what it does with freed memory, and if Samebits does (`src/samebits/malloc.py`).

    python -m benchmarks.freed_memory
    python -m benchmarks.freed_memory --procs 1 --models resnet18-128 --rounds 5

The choice can't be taken back, so each round starts the processes twice, once for each. All train the same network on
the same random images, 16 a process, by Samebits's reducer, one thread per process. Prints medians over the rounds, of
rank 0: step time, page faults of a step, and the most memory that the process had.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.exact_cost import MODELS, exact_steps
from benchmarks.small_networks import plain_world, spawn
from samebits.cores import schedule_threads
from samebits.malloc import keep_freed_memory

NUM_STEPS = {"cnn": 100, "resnet18-64": 8, "resnet18-128": 4}


class Measured(NamedTuple):
    """One process's steps: milliseconds and page faults of a step, and its largest memory in MB."""

    step_ms: float
    faults: float
    memory_mb: float


def work(rank: int, num_procs: int, name: str, keeps: bool, file: Path) -> None:
    """Train, and write what rank 0 measures to the file."""
    with plain_world(rank, num_procs) as here:
        schedule_threads(rank)
        if keeps:
            keep_freed_memory()
        step = exact_steps(name, here)
        for _ in range(3):
            step()
        dist.barrier()
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        for _ in range(NUM_STEPS[name]):
            step()
        seconds, usage = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        if rank == 0:
            steps = NUM_STEPS[name]
            measured = Measured(seconds / steps * 1e3, (usage.ru_minflt - faults) / steps, usage.ru_maxrss / 1e3)
            file.write_text(json.dumps(measured), encoding="utf-8")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, 16 samples per process and step, 1 thread each; glibc's choice / Samebits's")
    print("| processes | network | step ms | ratio | page faults of a step | memory MB |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        for num_procs in arguments.procs:
            for name in arguments.models:
                rounds: list[list[Measured]] = []
                for _ in range(arguments.rounds):
                    pair = []
                    for keeps in (False, True):
                        spawn(work, num_procs, num_procs, name, keeps, file)
                        pair.append(Measured(*json.loads(file.read_text(encoding="utf-8"))))
                    rounds.append(pair)
                ratio = statistics.median(kept.step_ms / default.step_ms for default, kept in rounds)
                default, kept = (
                    [statistics.median(values) for values in zip(*one, strict=True)]
                    for one in zip(*rounds, strict=True)
                )
                print(
                    f"| {num_procs} | {name} | {default[0]:.1f} / {kept[0]:.1f} | {ratio:.2f} "
                    f"| {default[1]:,.0f} / {kept[1]:,.0f} | {default[2]:,.0f} / {kept[2]:,.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
