"""Cost of exact mode: step time of the exact reduction against torch's DistributedDataParallel.

    python -m benchmarks.exact_cost                 # CNN, ResNet-18 at 64 and 128 px, 2 and 4 processes
    python -m benchmarks.exact_cost --procs 2 --models resnet18-64 --rounds 15

Both train the same network on the same random images, micro-batch 16 and one thread per process, CPU and gloo. They
take turns of a few steps in the same processes, so that a slower machine slows both. Gloo's threads and time slices are
as Samebits sets them in its rounds, and as torch leaves them in DDP's. Prints the median over the
rounds, and the median of the rounds' ratios to DDP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.small_networks import MICRO_BATCH, images_for, network, plain_world, rest_text, spawn
from samebits.cluster.world import World
from samebits.cores import TIME_SLICE_MS, core_ids, describe_other_load, place_gloo_threads, set_time_slice
from samebits.data.order import Order
from samebits.parallel.reduce import Reducer

MODELS = ("cnn", "resnet18-64", "resnet18-128")


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return network(name), images_for(name, MICRO_BATCH)


def ddp_steps(name: str) -> Callable[[], None]:
    model, inputs = build(name)
    targets = torch.arange(MICRO_BATCH) % 10
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), targets).backward()
        optimizer.step()

    return step


def exact_steps(name: str, here: World) -> Callable[[], None]:
    model, inputs = build(name)
    targets = torch.arange(MICRO_BATCH) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    order = Order(num_samples=10**6, global_batch=MICRO_BATCH * here.size, micro_batch=MICRO_BATCH)
    reducer = Reducer(model, here)
    steps = order.steps(here, stop=10**9)

    def step() -> None:
        plan = next(steps)
        reducer.begin(plan)
        for micro_batch in plan.micro_batches:
            with reducer.micro_batch(micro_batch):
                reducer.backward(F.cross_entropy(model(inputs), targets))
        reducer.reduce()
        optimizer.step()

    return step


def timed(step: Callable[[], None], num_steps: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps


def place(rank: int, *, as_samebits: bool) -> None:
    """Place gloo's threads and set the time slice as Samebits does, or reset them."""
    set_time_slice(TIME_SLICE_MS if as_samebits else 0)
    for thread in place_gloo_threads(rank):
        if not as_samebits:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(thread, core_ids())


def work(rank: int, num_procs: int, arguments: argparse.Namespace) -> None:
    with plain_world(rank, num_procs) as here:
        for name in arguments.models:
            steps = [ddp_steps(name), exact_steps(name, here)]
            num_steps = 50 if name == "cnn" else 3
            times: list[list[float]] = []
            for number in range(arguments.rounds + 1):
                row = []
                for step in steps:
                    place(rank, as_samebits=step is not steps[0])
                    row.append(timed(step, num_steps))
                if number:  # the first round warms up
                    times.append(row)
            if rank == 0:
                ms = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
                ratio = statistics.median(ours / ddp for ddp, ours in times)
                print(f"{num_procs:5}  {name:13} {ms[0]:9.2f} {ms[1]:9.2f} {ratio:7.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {MICRO_BATCH} samples per process and step, 1 thread each")
    print("procs  model            DDP ms  exact ms   ratio")
    loads = [describe_other_load()]
    for num_procs in arguments.procs:
        spawn(work, num_procs, num_procs, arguments)
        loads.append(describe_other_load())
    print(rest_text(*loads))


if __name__ == "__main__":
    main()
