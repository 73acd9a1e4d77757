"""Cost of batch norm over the global batch: step time with `batch_norm=sync`, with `micro`, and in torch's DDP.

    python -m benchmarks.sync_batch_norm                                  # ResNet-18 and CNN, 1, 2 and 4 processes
    python -m benchmarks.sync_batch_norm --procs 2 --models resnet18-64 --micro-batches 4

All train the same network on the same random images, one thread per process, CPU and gloo. DDP uses torch's ordinary
batch norm, because its synchronized one refuses CPU tensors. They take turns of a few steps in the same processes.
Prints the median step time over the rounds, and the medians of the rounds' ratios. "CPU" is sync / micro of rank 0's
CPU time, which other work on the machine affects less, and which excludes waiting for other ranks. For "no messages"
each rank takes its own sums for those of all: these are the operations, the rest of sync / micro is the exchange.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.small_networks import images_for, network, plain_world, spawn
from samebits.cluster.world import World
from samebits.cores import let_gloo_threads_preempt, schedule_threads
from samebits.data.order import MicroBatch, Order
from samebits.malloc import keep_freed_memory
from samebits.parallel.reduce import Reducer

SAMPLES = 16  # of a micro-batch
MODELS = ("mnist", "resnet18-64", "resnet18-128", "resnet50-64")


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    form = torch.channels_last
    return network(name).to(memory_format=form), images_for(name, SAMPLES).contiguous(memory_format=form)


def ddp_steps(name: str, num_micro: int) -> Callable[[], None]:
    model, inputs = build(name)
    targets = torch.arange(SAMPLES) % 10
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with ddp.no_sync():
            for _ in range(num_micro - 1):
                (F.cross_entropy(ddp(inputs), targets) / num_micro).backward()
        (F.cross_entropy(ddp(inputs), targets) / num_micro).backward()
        optimizer.step()

    return step


def samebits_steps(
    name: str, here: World, num_micro: int, synchronized: bool, *, has_messages: bool = True
) -> Callable[[], None]:
    model, inputs = build(name)
    targets = torch.arange(SAMPLES) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    order = Order(num_samples=10**6, global_batch=SAMPLES * num_micro * here.size, micro_batch=SAMPLES)
    reducer = Reducer(model, here, synchronized=synchronized)
    steps = order.steps(here, stop=10**9)

    def run(micro_batch: MicroBatch) -> None:
        with reducer.micro_batch(micro_batch):
            reducer.backward(F.cross_entropy(model(inputs), targets))

    def step() -> None:
        reducer.begin(next(steps))
        reducer.run(run)
        reducer.reduce()
        optimizer.step()

    if not has_messages:
        step()
        assert reducer._layer_sums is not None
        reducer._layer_sums._rounds = []  # planned in the first step
    return step


def timed(step: Callable[[], None], num_steps: int, rank: int, *, sync: bool) -> tuple[float, float]:
    """Return milliseconds of a step: elapsed, and CPU time of this process."""
    schedule_threads(rank)  # as Samebits does; DDP gains by it, too
    if sync:
        let_gloo_threads_preempt(dist.get_world_size())
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps * 1e3, (time.process_time() - cpu) / num_steps * 1e3


def work(rank: int, num_procs: int, arguments: argparse.Namespace) -> None:
    with plain_world(rank, num_procs) as here:
        keep_freed_memory()  # as a run of Samebits does; torch itself leaves it to the user
        for name in arguments.models:
            for num_micro in arguments.micro_batches:
                kinds = (
                    ddp_steps(name, num_micro),
                    samebits_steps(name, here, num_micro, False),
                    samebits_steps(name, here, num_micro, True),
                    samebits_steps(name, here, num_micro, True, has_messages=False),
                )
                num_steps = 10 if name == "mnist" else 1
                rounds = [
                    [timed(step, num_steps, rank, sync=step in kinds[2:]) for step in kinds]
                    for _ in range(arguments.rounds + 1)
                ][1:]
                if rank == 0:
                    clock = [[wall for wall, _ in times] for times in rounds]
                    ddp, micro, sync, _ = (statistics.median(column) for column in zip(*clock, strict=True))
                    to_micro, no_messages = (
                        statistics.median(times[kind] / times[1] for times in clock) for kind in (2, 3)
                    )
                    to_ddp = statistics.median(times[2] / times[0] for times in clock)
                    in_cpu = statistics.median(times[2][1] / times[1][1] for times in rounds)
                    print(
                        f"| {num_procs} | {num_micro} | {name} | {ddp:.1f} | {micro:.1f} | {sync:.1f} "
                        f"| {to_micro:.2f} | {no_messages:.2f} | {to_ddp:.2f} | {in_cpu:.2f} |",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mnist", "resnet18-64"])
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[1, 2], help="micro-batches per process and step"
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, micro-batches of {SAMPLES} samples, 1 thread per process; step times in ms")
    print(
        "| processes | micro-batches each | network | DDP | micro | sync | sync/micro | no messages | sync/DDP | CPU |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for num_procs in arguments.procs:
        spawn(work, num_procs, num_procs, arguments)


if __name__ == "__main__":
    main()
