"""Cost of the hang detector and the replica check: step time with and without them, on real processes.

    python -m benchmarks.watch_cost
    python -m benchmarks.watch_cost --procs 2 --models cnn --rounds 21

With them, every step records its activity, two threads per rank wake up once a second, and rank 0 receives all
reports. Blocks take turns in the same processes. Prints medians over the rounds, the median of the rounds' ratios,
the same for rank 0's CPU time, which other work on the machine affects less, and the time of one comparison of the
ranks' weights and optimizer state (`watch.replica_check_every`: once per epoch). CPU, gloo, one thread per process.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.small_networks import MICRO_BATCH, assignment, job_of, spawn
from samebits.cluster import collectives
from samebits.cluster.activity import Activity
from samebits.cluster.world import World, join
from samebits.engine.replica_check import ReplicaCheck
from samebits.engine.step import run_step
from samebits.watchdog.detector import HangDetector

MODELS = ("cnn", "resnet18-64")


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in ("enter", "begin_step", "end_work", "end_wait"):
            stack.enter_context(patch.object(Activity, name, lambda *_, **__: None))
        yield


def measure(name: str, world: World, folder: Path, rounds: int, block_s: float) -> None:
    job = job_of(name, world, num_samples=320, global_batch=MICRO_BATCH * world.size)
    (loader, steps), drift = job.open_loader(), ReplicaCheck(job)

    def block() -> int:
        end, num_steps, is_over = time.perf_counter() + block_s, 0, False
        while not is_over:
            # Rank 0's clock tells all when to end, as it tells them to stop.
            is_over = run_step(job, next(steps), loader, float(time.perf_counter() > end)).flag > 0
            job.progress.step += 1
            num_steps += 1
        return num_steps

    def timed(watched: bool) -> tuple[float, float, float]:
        with HangDetector(world, 300.0, folder) if watched else unwatched():
            collectives.barrier(world, 60)
            start, cpu_start = time.perf_counter(), time.process_time()
            num_steps = block()
            end, cpu_end = time.perf_counter(), time.process_time()
            if watched:
                drift.compare(job)
            compared = time.perf_counter()
        return (end - start) / num_steps, (cpu_end - cpu_start) / num_steps, compared - end

    timed(True)
    rows = []
    for number in range(rounds):
        # Who comes first takes turns too.
        pair = {watched: timed(watched) for watched in (number % 2 == 0, number % 2 == 1)}
        rows.append([*pair[False][:2], *pair[True]])
    if world.is_main:
        off_s, off_cpu_s, on_s, on_cpu_s, compare_s = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(row[2] / row[0] for row in rows)
        cpu_ratio = statistics.median(row[3] / row[1] for row in rows)
        print(
            f"{world.size:5}  {name:12} {off_s * 1e3:8.2f} {on_s * 1e3:8.2f}  {ratio:6.3f}"
            f"  {off_cpu_s * 1e3:8.2f} {on_cpu_s * 1e3:8.2f}  {cpu_ratio:6.3f}  {compare_s * 1e3:10.1f}",
            flush=True,
        )


def work(rank: int, folder: Path, models: list[str], rounds: int, block_s: float) -> None:
    with join(assignment(), device="cpu") as world:
        for name in models:
            measure(name, world, folder, rounds, block_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--block-s", type=float, default=3.0)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {MICRO_BATCH} samples per process and step, 1 thread each")
    print("                    step, ms                  CPU time, ms                one check,")
    print("procs  model          off       on   ratio       off       on   ratio           ms")
    with tempfile.TemporaryDirectory() as folder:
        for num_procs in arguments.procs:
            spawn(work, num_procs, Path(folder), arguments.models, arguments.rounds, arguments.block_s)


if __name__ == "__main__":
    main()
