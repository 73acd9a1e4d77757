"""Cost of exact mode: step time of the exact reduction against torch's DistributedDataParallel.

    python -m benchmarks.exact_cost                 # CNN, ResNet-18 at 64 and 128 px, 2 and 4 processes
    python -m benchmarks.exact_cost --procs 2 --models resnet18-64 --rounds 15
    python -m benchmarks.exact_cost --procs 2 --models cnn --two-groups   # one gloo group for each direction as well

Both train the same network on the same random images, micro-batch 16 and one thread per process, CPU and gloo. They
take turns of a few steps in the same processes, so that a slower machine slows both. Gloo's threads are placed as
Lockstep places them in its rounds, and as torch leaves them in DDP's (--unplaced: in both). Prints the median over the
rounds, and the median of the rounds' ratios to DDP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.small_networks import MICRO_BATCH, images_for, network, plain_world, spawn
from lockstep.cluster.world import World
from lockstep.cores import core_ids, place_gloo_threads
from lockstep.data.order import Order
from lockstep.parallel.exchange import tree_all_reduce
from lockstep.parallel.exchange.tree_all_reduce import Message, Work
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


@dataclass(frozen=True)
class TwoGroupWorld(World):
    """A world that sends messages to lower and to higher ranks over a gloo group each.

    A group's thread then does not meet the main thread's sends on the connection that it receives from.

    Attributes:
        groups: The two groups.
    """

    groups: Sequence[Any] = ()


@tree_all_reduce.post.register
def _(world: TwoGroupWorld, messages: Sequence[Message]) -> Sequence[Work]:
    chosen = [world.groups[(it.peer < world.rank) == it.is_receive] for it in messages]
    return [
        (group.recv if it.is_receive else group.send)([it.values], it.peer, it.tag)
        for group, it in zip(chosen, messages, strict=True)
    ]


def with_two_groups(here: World) -> TwoGroupWorld:
    values = {each.name: getattr(here, each.name) for each in fields(here)}
    return TwoGroupWorld(**values, groups=(dist.distributed_c10d._get_default_group(), dist.new_group()))


def work(rank: int, num_procs: int, models: list[str], rounds: int, is_unplaced: bool, has_two_groups: bool) -> None:
    with plain_world(rank, num_procs) as here:
        for name in models:
            steps = [ddp_steps(name), exact_steps(name, here)]
            if has_two_groups:
                steps.append(exact_steps(name, with_two_groups(here)))
            num_steps = 50 if name == "cnn" else 3
            times: list[list[float]] = []
            for number in range(rounds + 1):
                row = []
                for step in steps:
                    place(rank, as_lockstep=step is not steps[0] and not is_unplaced)
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
    parser.add_argument("--two-groups", action="store_true", help="also measure one gloo group for each direction")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {MICRO_BATCH} samples per process and step, 1 thread each")
    more = arguments.two_groups
    ms, ratio = ("  2 groups", "  2 groups") if more else ("", "")
    print(f"procs  model            DDP ms  exact ms{ms}   ratio{ratio}")
    for num_procs in arguments.procs:
        spawn(work, num_procs, num_procs, arguments.models, arguments.rounds, arguments.unplaced, more)


if __name__ == "__main__":
    main()
