"""Cost of exact mode: step time of the exact reduction against torch's DistributedDataParallel.

    python -m benchmarks.exact_cost                 # CNN, ResNet-18 at 64 and 128 px, 2 and 4 processes
    python -m benchmarks.exact_cost --procs 2 --models resnet18-64 --rounds 15
    python -m benchmarks.exact_cost --procs 2 --models cnn --one-group   # all messages in the default group as well

Both train the same network on the same random images, micro-batch 16 and one thread per process, CPU and gloo. They
take turns of a few steps in the same processes, so that a slower machine slows both. Gloo's threads and time slices are
as Samebits sets them in its rounds, and as torch leaves them in DDP's (--unplaced: in both). Prints the median over the
rounds, and the median of the rounds' ratios to DDP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.small_networks import MICRO_BATCH, images_for, network, plain_world, spawn
from samebits.cluster.world import World
from samebits.cores import TIME_SLICE_MS, core_ids, place_gloo_threads, set_time_slice
from samebits.data.order import Order
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.exchange.tree_all_reduce import Message, Work
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


def place(rank: int, *, as_samebits: bool, time_slice_ms: float) -> None:
    """Place gloo's threads and set the time slice as Samebits does, or reset them."""
    set_time_slice(time_slice_ms if as_samebits else 0)
    for thread in place_gloo_threads(rank):
        if not as_samebits:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(thread, core_ids())


class OneGroupWorld(World):
    """A world that sends all its messages in the default group."""


@tree_all_reduce.post.register
def _(world: OneGroupWorld, messages: Sequence[Message]) -> Sequence[Work]:
    group = dist.distributed_c10d._get_default_group()
    return [(group.recv if it.is_receive else group.send)([it.values], it.peer, it.tag) for it in messages]


def with_one_group(here: World) -> OneGroupWorld:
    return OneGroupWorld(**{each.name: getattr(here, each.name) for each in fields(here)})


def work(rank: int, num_procs: int, arguments: argparse.Namespace) -> None:
    with plain_world(rank, num_procs) as here:
        for name in arguments.models:
            steps = [ddp_steps(name), exact_steps(name, here)]
            if arguments.one_group:
                steps.append(exact_steps(name, with_one_group(here)))
            num_steps = 50 if name == "cnn" else 3
            times: list[list[float]] = []
            for number in range(arguments.rounds + 1):
                row = []
                for step in steps:
                    is_ours = step is not steps[0] and not arguments.unplaced
                    place(rank, as_samebits=is_ours, time_slice_ms=arguments.time_slice)
                    row.append(timed(step, num_steps))
                if number:  # the first round warms up
                    times.append(row)
            if rank == 0:
                ms = [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
                ratios = [statistics.median(row[k] / row[0] for row in times) for k in range(1, len(steps))]
                cells = [f"{each:9.2f}" for each in ms] + [f"{each:7.3f}" for each in ratios]
                print(f"{num_procs:5}  {name:13} " + " ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--unplaced", action="store_true", help="leave gloo's threads as torch starts them")
    parser.add_argument("--one-group", action="store_true", help="also measure with all messages in one group")
    parser.add_argument("--time-slice", type=float, default=TIME_SLICE_MS, help="milliseconds; 0: the system's own")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {MICRO_BATCH} samples per process and step, 1 thread each")
    more = arguments.one_group
    ms, ratio = ("   1 group", "   1 group") if more else ("", "")
    print(f"procs  model            DDP ms  exact ms{ms}   ratio{ratio}")
    for num_procs in arguments.procs:
        spawn(work, num_procs, num_procs, arguments)


if __name__ == "__main__":
    main()
