"""Memory and step time of `parallel=fsdp` beside ddp.

    python -m benchmarks.exact_sharding [--procs 2 4] [--models linear resnet18-64] [--rounds 7]

All train the same network with AdamW on the same random images, one thread per process, CPU and gloo. Step times are
medians over rounds in which the two take turns in the same processes; the ratios are medians of the rounds' ratios.
As in any process with a sharded model, the C library returns freed memory at once, which costs ddp time, too.
Memory is measured in processes of their own: the highest resident memory of the busiest process during steps, after
the first one, above what it has before it builds the model. The start needs the whole model once. The last column is
the values of weights, gradients and optimizer state that a process keeps between steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.small_networks import SHAPES, job_of, plain_world, spawn
from samebits.cluster.world import World
from samebits.engine.job import Job
from samebits.engine.step import run_step

WAYS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel": "fsdp"}}
NUM_STEPS = 3  # in a row


def open_job(name: str, world: World, way: str, num_micro: int, micro_batch: int) -> tuple[Job, Callable[[], None]]:
    """Return a job, and a function that runs its next step."""
    samples = num_micro * micro_batch * world.size
    job = job_of(
        name, world, num_samples=samples, global_batch=samples, micro_batch=micro_batch, optim={"name": "adamw"},
        **WAYS[way],
    )  # fmt: skip
    loader, steps = job.open_loader()

    def step() -> None:
        plan = next(steps)
        run_step(job, plan, loader)

    return job, step


def status_mb(field: str) -> float:
    """Return an entry of this process's status, in MB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


def state_mb(job: Job) -> float:
    """Return the size of this process's weights, gradients and optimizer state, in MB."""
    parameters = list(job.replica.trained.parameters())
    tensors = [*parameters, *(each.grad for each in parameters if each.grad is not None)]
    tensors += [value for entries in job.optimizer.state.values() for value in entries.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def measure_memory(rank: int, num_procs: int, name: str, way: str, arguments: argparse.Namespace, results: Any) -> None:
    """Put the peak during steps and the state between steps, in MB, of the busiest process."""
    with plain_world(rank, num_procs) as world:
        _, step = open_job("tiny", world, way, 1, arguments.micro_batch)
        step()  # imports, threads and connections
        before = status_mb("VmRSS")
        job, step = open_job(name, world, way, arguments.num_micro, arguments.micro_batch)
        step()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # start a new peak
        for _ in range(NUM_STEPS):
            step()
        figures = torch.tensor([status_mb("VmHWM") - before, state_mb(job)])
        dist.all_reduce(figures, dist.ReduceOp.MAX)
        if rank == 0:
            results.put(figures.tolist())


def measure_time(rank: int, num_procs: int, name: str, arguments: argparse.Namespace, results: Any) -> None:
    """Put the seconds of a step of each way, in rounds: elapsed, and CPU time of rank 0."""
    with plain_world(rank, num_procs) as world:
        steps = [open_job(name, world, way, arguments.num_micro, arguments.micro_batch)[1] for way in WAYS]
        rounds = []
        for _ in range(arguments.rounds + 1):
            times = []
            for step in steps:
                dist.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                for _ in range(NUM_STEPS):
                    step()
                times.append(((time.perf_counter() - start) / NUM_STEPS, (time.process_time() - cpu) / NUM_STEPS))
            rounds.append(times)
        if rank == 0:
            results.put(rounds[1:])


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["linear", "resnet18-64"])
    parser.add_argument("--num-micro", type=int, default=1, help="micro-batches per process and step")
    parser.add_argument("--micro-batch", type=int, default=16, help="samples of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    print(
        f"torch {torch.__version__}, {arguments.num_micro} micro-batches of {arguments.micro_batch} samples per process"
    )
    print("| processes | network | way | step ms | to ddp | CPU to ddp | peak MB | to ddp | state MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    results = mp.get_context("spawn").SimpleQueue()
    for num_procs in arguments.procs:
        for name in arguments.models:
            spawn(measure_time, num_procs, num_procs, name, arguments, results)
            rounds, memory = results.get(), {}
            for way in WAYS:
                spawn(measure_memory, num_procs, num_procs, name, way, arguments, results)
                memory[way] = results.get()
            for index, way in enumerate(WAYS):
                of_step = statistics.median(times[index][0] for times in rounds) * 1e3
                to_ddp, cpu = (
                    statistics.median(times[index][kind] / times[0][kind] for times in rounds) for kind in (0, 1)
                )
                peak, state = memory[way]
                print(
                    f"| {num_procs} | {name} | {way} | {of_step:.1f} | {to_ddp:.2f} | {cpu:.2f} "
                    f"| {peak:.0f} | {peak / memory['ddp'][0]:.2f} | {state:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
