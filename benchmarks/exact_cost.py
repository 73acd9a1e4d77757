"""Cost of exact mode: step time of the exact reduction against torch's DistributedDataParallel.

    python -m benchmarks.exact_cost                 # CNN, ResNet-18 at 64 and 128 px, 2 and 4 processes
    python -m benchmarks.exact_cost --procs 2 --models resnet18-64 --rounds 15

Both train the same network on the same random images, micro-batch 16 and one thread per process, CPU and gloo. They
take turns of a few steps in the same processes, so that a slower machine slows both. Gloo's threads are placed as
Lockstep places them in its rounds, and as torch leaves them in DDP's (--unplaced: in both). Prints the median over the
rounds, and the median of the rounds' ratios.
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

from benchmarks.small_networks import MICRO_BATCH, images_for, network, plain_world, spawn
from lockstep.cluster.world import World
from lockstep.cores import core_ids, place_gloo_threads
from lockstep.data.order import Order
from lockstep.parallel.reduce import Reducer

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


def place(rank: int, *, as_lockstep: bool) -> None:
    """Place gloo's threads as Lockstep does, or reset them."""
    for thread in place_gloo_threads(rank):
        if not as_lockstep:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(thread, core_ids())


def work(rank: int, num_procs: int, models: list[str], rounds: int, is_unplaced: bool) -> None:
    with plain_world(rank, num_procs) as here:
        for name in models:
            ddp, exact = ddp_steps(name), exact_steps(name, here)
            num_steps = 50 if name == "cnn" else 3
            times: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                place(rank, as_lockstep=False)
                ddp_time = timed(ddp, num_steps)
                place(rank, as_lockstep=not is_unplaced)
                pair = ddp_time, timed(exact, num_steps)
                if number:  # the first round warms up
                    times.append(pair)
            if rank == 0:
                ddp_s, exact_s = (statistics.median(column) for column in zip(*times, strict=True))
                ratio = statistics.median(exact_s / ddp_s for ddp_s, exact_s in times)
                print(f"{num_procs:5}  {name:13} {ddp_s * 1e3:9.2f} {exact_s * 1e3:9.2f}  {ratio:6.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--unplaced", action="store_true", help="leave gloo's threads as torch starts them")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {MICRO_BATCH} samples per process and step, 1 thread each")
    print("procs  model            DDP ms  exact ms   ratio")
    for num_procs in arguments.procs:
        spawn(work, num_procs, num_procs, arguments.models, arguments.rounds, arguments.unplaced)


if __name__ == "__main__":
    main()
