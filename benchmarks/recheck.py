"""Whether `watch.recheck` names a rank that computes wrong values, how soon, and what it costs.

    python -m benchmarks.recheck                     both
    python -m benchmarks.recheck trials --trials 50
    python -m benchmarks.recheck cost --rounds 15

Trials: three ranks train a small network. On one of them, chosen at random, one bit of one micro-batch in 20 is flipped
after its backward pass: any bit of any gradient, loss term or change of a buffer. A trial ends when a rank is named, or
after 150 steps. Printed is how many trials name the right rank, beside the rate that theory gives: at recheck=1/50, n
steps of m micro-batches a rank compare n m / 50 micro-batches of that rank with others, and as many that it repeats
itself. Each of them is a flipped one with probability 1/20, so all are missed with (1 - 1/20)^(2 n m / 50).

Cost: blocks of steps with and without recheck take turns inside the same two processes. Printed are the medians over
the rounds of a step's time with it divided by that without it, by the clock and by rank 0's CPU time, which other work
on the machine changes less. Only one step in 50 / m has repeats, so these are noisy; more exact is what the times of a
step without and with a repeat give, which take turns: 1 + m / 50 (with / without - 1), by both clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch

from benchmarks.small_networks import assignment, job_of, spawn
from samebits.cluster import collectives
from samebits.cluster.world import World, join
from samebits.config.schema import WatchConfig
from samebits.data.loader import Loader
from samebits.engine.job import Job
from samebits.engine.step import run_step
from samebits.parallel.recheck import RecheckedReducer

FLIPPED = 20  # one micro-batch in this many
MAX_STEPS = 150
TITLE = """\
               m   blocks of steps, ms     their CPU time, ms       steps with a repeat, ms  their CPU time, ms
model                  off       on ratio       off       on ratio      none     with ratio     none     with ratio"""


def job_with(name: str, world: World, per_rank: int, micro_batch: int, recheck: str | None, seed: int = 0) -> Job:
    """Return a job of `per_rank` micro-batches per rank and step."""
    global_batch = micro_batch * per_rank * world.size
    return job_of(
        name, world, num_samples=2 * global_batch, global_batch=global_batch, micro_batch=micro_batch, seed=seed,
        watch=WatchConfig(recheck=recheck),
    )  # fmt: skip


@contextlib.contextmanager
def flipping(seed: int, one_in: int = FLIPPED) -> Iterator[None]:
    """Flip a random bit of one leaf in `one_in`, after the backward pass and before anything looks at it."""
    rng, real = random.Random(seed), RecheckedReducer._end

    def end(reducer: RecheckedReducer, number: int) -> None:
        bucket, leaf = reducer._sum.buckets[number], reducer._sum.leaves[number]
        if rng.randrange(one_in) == 0:
            used = bucket.tail_start + bucket.tail_length
            bits = leaf.flat.values[:used].view(torch.int32)
            bits[rng.randrange(used)] ^= 1 << rng.randrange(31)
        real(reducer, number)

    with patch.object(RecheckedReducer, "_end", end):
        yield


def trial(world: World, number: int, per_rank: int, recheck: str, max_steps: int = MAX_STEPS) -> tuple[int, str, int]:
    """Train with a faulty rank until one is named.

    Returns:
        The faulty rank, the text that names one (empty: none was named), and the number of steps.
    """
    faulty = random.Random(number).randrange(world.size)
    job = job_with("tiny", world, per_rank, 2, recheck, seed=number)
    said: list[str] = []
    assert isinstance(job.reducer, RecheckedReducer)
    job.reducer.notify = lambda error: said.append(str(error))
    loader, steps = job.open_loader(max_steps)
    with flipping(number) if world.rank == faulty else contextlib.nullcontext():
        for step in steps:
            try:
                run_step(job, step, loader)
            except Exception as error:
                said.append(str(error))
            job.progress.step += 1
            if said:
                break
    loader.close()
    return faulty, said[0] if said else "", job.progress.step


def trials(world: World, num_trials: int, cases: list[tuple[int, str]]) -> None:
    for per_rank, recheck in cases:
        numbers, num_right, num_wrong = [], 0, 0
        for number in range(num_trials):
            faulty, text, num_steps = trial(world, number, per_rank, recheck)
            is_right = text.startswith(f"training error: rank {faulty} computed wrong values")
            num_right += is_right
            num_wrong += bool(text) and not is_right
            if is_right:
                numbers.append(num_steps)
        if world.is_main:
            share = 1 / int(recheck.split("/")[1])
            theory = 1 - (1 - 1 / FLIPPED) ** (2 * MAX_STEPS * per_rank * share)
            steps = f"{statistics.median(numbers):5.0f} {max(numbers):5}" if numbers else "    -     -"
            print(
                f"{recheck:>8} {per_rank:12}   {num_right:3} of {num_trials:3} {num_wrong:6} {steps}   {theory:6.3f}",
                flush=True,
            )


def cost(world: World, name: str, per_rank: int, rounds: int, block: int) -> None:
    jobs = {on: job_with(name, world, per_rank, 16, "1/50" if on else None) for on in (False, True)}
    opened = {on: job.open_loader() for on, job in jobs.items()}
    loaders = {on: loader for on, (loader, _) in opened.items()}

    def timed(on: bool) -> tuple[float, float]:
        collectives.barrier(world, 60)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(block):
            run_step(jobs[on], next(opened[on][1]), loaders[on])
        return (time.perf_counter() - start) / block, (time.process_time() - cpu) / block

    for on in (False, True):
        timed(on)
    rows = []
    for number in range(rounds):
        pair = {on: timed(on) for on in (number % 2 == 0, number % 2 == 1)}
        rows.append([*pair[False], *pair[True]])
    plain, checked, cpu_plain, cpu_checked = parts_of_cost(world, jobs[True], loaders[True], rounds)
    if world.is_main:
        off_s, off_cpu_s, on_s, on_cpu_s = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.fmean(row[2] for row in rows) / statistics.fmean(row[0] for row in rows)
        cpu_ratio = statistics.fmean(row[3] for row in rows) / statistics.fmean(row[1] for row in rows)
        parts = [1 + per_rank / 50 * (more / less - 1) for more, less in ((checked, plain), (cpu_checked, cpu_plain))]
        print(
            f"{name:12} {per_rank:4}  {off_s * 1e3:8.2f} {on_s * 1e3:8.2f} {ratio:5.3f}  {off_cpu_s * 1e3:8.2f} "
            f"{on_cpu_s * 1e3:8.2f} {cpu_ratio:5.3f}  {plain * 1e3:8.2f} {checked * 1e3:8.2f} {parts[0]:5.3f} "
            f"{cpu_plain * 1e3:8.2f} {cpu_checked * 1e3:8.2f} {parts[1]:5.3f}",
            flush=True,
        )
    for loader in loaders.values():
        loader.close()


def parts_of_cost(world: World, job: Job, loader: Loader, rounds: int) -> list[float]:
    """Return the median times of a step without and with rechecks, alternately, by the clock and of the CPU."""
    per_rank = -(-job.order.global_batch // job.order.micro_batch // world.size)
    order = replace(job.order, recheck=1 / per_rank)  # one repeat in each step
    times: list[list[float]] = [[], [], [], []]
    for step in order.steps(world, start=10, stop=10 + 4 * rounds):
        pair = [(0, replace(step, rechecks=(), repeats=())), (1, step)]
        for column, now in pair if step.number % 2 else reversed(pair):
            collectives.barrier(world, 60)
            start, cpu = time.perf_counter(), time.process_time()
            run_step(job, now, loader)
            times[column].append(time.perf_counter() - start)
            times[column + 2].append(time.process_time() - cpu)
    return [statistics.median(column) for column in times]


def work(rank: int, arguments: argparse.Namespace) -> None:
    with join(assignment(), device="cpu") as world:
        if world.size == 3:
            trials(world, arguments.trials, [(32, "1/50"), (4, "1/5"), (4, "1/50")])
        else:
            for name, per_rank, block in (("cnn", 4, 50), ("cnn", 1, 200), ("resnet18-64", 4, 13)):
                if name in arguments.models:
                    cost(world, name, per_rank, arguments.rounds, block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["trials", "cost", "both"], default="both")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet18-64"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for what, num_procs, title in (
        ("trials", 3, " recheck micro-batches   right rank  wrong  steps:  max   theory"),
        ("cost", 2, TITLE),
    ):
        if arguments.what in (what, "both"):
            print(title)
            spawn(work, num_procs, arguments)


if __name__ == "__main__":
    main()
