"""Cost of `samebits.exact`: a step of a script's loop in exact form, and its usual step with DistributedDataParallel.

    python -m benchmarks.own_loop
    python -m benchmarks.own_loop --procs 2 --models cnn --steps 100
    python -m benchmarks.own_loop --repetition 20      # what the repeated micro-batch of some steps costs
    python -m benchmarks.own_loop --idle 20            # what the comparison of idle ranks costs

Both loops run in the same processes and take turns after each step, so other programs affect both alike. Prints medians
over the steps, the median of the ratios of neighboring steps, and the ratio of rank 0's CPU time, which other programs
affect less. Peak memory (RSS) is measured in processes that run
one of the loops only. CPU, gloo, one thread for each process, one micro-batch of 16 samples a rank.

`--repetition N`: N pairs of epochs of 100 steps on one process, with and without the repetition that begins with the
first step of a process, in turn. Prints the median of what they cost, and the quartiles, for 1 and 4 micro-batches a
step.

`--idle N`: steps of 7 micro-batches on 3 processes, two of which repeat a micro-batch, with the comparison of its
gradients and without it, in turn. Prints the ratio of rank 0's CPU time over N blocks of steps, each with one exchange
of sums: the median and the quartiles.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samebits
from samebits.cluster.address import ReservedPort
from samebits.data.order import Step
from samebits.own_loop import idle
from samebits.own_loop.habits import RepeatCheck

MICRO_BATCH = 16
MODELS = {"cnn": (1, 28), "resnet18-64": (3, 64)}  # channels, pixels
FORMS = ("usual", "exact")
IDLE_FORMS = ("unchecked", "checked")
IDLE_PROCS, IDLE_MICRO_BATCHES = 3, 7


class NoCheck:
    """Stands for `idle.IdleSlots`, and compares nothing."""

    def begin(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    take = end_step = begin


class NoRepetition(RepeatCheck):
    """Repeats nothing."""

    def num_bodies(self, step: Step, *, begins: bool = False) -> int:
        """See `RepeatCheck.num_bodies`."""
        return len(step.micro_batches)


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name != "cnn":
        return torchvision.models.resnet18(num_classes=10)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10),
    )  # fmt: skip


def steps(name: str, form: str) -> Iterator[None]:
    """Run a script's loop, and yield after each step."""
    channels, size = MODELS[name]
    torch.manual_seed(0)  # all ranks have the same data
    data = TensorDataset(torch.randn(640, channels, size, size), torch.arange(640) % 10)
    loader: Any = DataLoader(data, batch_size=MICRO_BATCH, sampler=DistributedSampler(data))
    model = network(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if form != "usual":
        num_micro_batches = dist.get_world_size() if form == "exact" else IDLE_MICRO_BATCHES
        model, optimizer, loader = samebits.exact(
            model, optimizer, loader, global_batch=MICRO_BATCH * num_micro_batches
        )
        if form == "unchecked":
            loader.loop._idle = NoCheck()
    else:
        model = DistributedDataParallel(model)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if form != "usual":
                if not loader.sync_gradients:
                    continue
                loader.loop.look()  # it ends after a number of steps, which here are bodies
                loader.loop._guard.micro_batch = None  # the other form's optimizer acts between two bodies
            yield


def worker(rank: int, procs: int, port: int, name: str, forms: tuple[str, ...], num_steps: int, answers: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=procs)
    loops = {form: steps(name, form) for form in forms}
    seconds: dict[str, list[float]] = {f"{form}{kind}": [] for form in forms for kind in ("", " cpu")}
    for number in range(num_steps + 5):
        for form in forms if number % 2 else forms[::-1]:
            start, cpu_start = time.perf_counter(), time.process_time()
            next(loops[form])
            if number >= 5:  # the first ones allocate
                seconds[form].append(time.perf_counter() - start)
                seconds[f"{form} cpu"].append(time.process_time() - cpu_start)
    for loop in loops.values():
        loop.close()  # type: ignore[attr-defined]
    if rank == 0:
        answers.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    dist.destroy_process_group()


def repetition(name: str, num_micro_batches: int, num_pairs: int) -> list[float]:
    """Return what the repetitions of an epoch of 100 steps cost, as fractions of the epoch's CPU time, by pair.

    Only the steps with a repetition differ. Each is compared with the same step without it, so the noise of the others
    does not count.
    """
    torch.set_num_threads(1)
    channels, size = MODELS[name]
    num_samples = 100 * MICRO_BATCH * num_micro_batches
    data = TensorDataset(torch.randn(num_samples, channels, size, size), torch.arange(num_samples) % 10)
    loops = []
    for _ in range(2):
        model = network(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        loaded = DataLoader(data, batch_size=MICRO_BATCH, shuffle=True)
        loops.append(samebits.exact(model, optimizer, loaded, global_batch=MICRO_BATCH * num_micro_batches))
    costs = []
    for number in range(num_pairs + 1):
        seconds: list[list[float]] = [[], []]
        looking: list[int] = []
        for has_repetition in (number % 2, 1 - number % 2):
            model, optimizer, loader = loops[has_repetition]
            loader.loop.repeat = RepeatCheck() if has_repetition else NoRepetition()
            start = time.process_time()
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if loader.sync_gradients:
                    seconds[has_repetition].append(time.process_time() - start)
                    start = time.process_time()
                    if has_repetition and loader.loop.repeat.is_looking:
                        looking.append(len(seconds[1]) - 1)
        if number:  # the first pair allocates
            more = sum(seconds[1][step] - seconds[0][step] for step in looking)
            costs.append(more / (len(seconds[0]) * statistics.median(seconds[0])))
    return costs


def measure(procs: int, name: str, forms: tuple[str, ...], num_steps: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each step by form, and rank 0's peak memory in MiB."""
    answers: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    reserved = ReservedPort()
    port = reserved.renew()
    mp.spawn(worker, (procs, port, name, forms, num_steps, answers), procs)
    return answers.get()


def cost_of_idle_check(name: str, num_blocks: int) -> list[float]:
    """Return the ratio of the CPU time with the comparison to that without it, of each block of steps."""
    seconds, _ = measure(IDLE_PROCS, name, IDLE_FORMS, num_blocks * idle.NUM_STEPS)
    sums = [
        [sum(seconds[f"{form} cpu"][first : first + idle.NUM_STEPS]) for form in IDLE_FORMS]
        for first in range(0, num_blocks * idle.NUM_STEPS, idle.NUM_STEPS)
    ]
    return [checked / unchecked for unchecked, checked in sums]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repetition", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--idle", type=int, default=0, metavar="BLOCKS")
    arguments = parser.parse_args()
    for name in arguments.models if arguments.idle else ():
        low, median, high = statistics.quantiles(cost_of_idle_check(name, arguments.idle), n=4)
        print(
            f"{name}, {IDLE_PROCS} processes, {IDLE_MICRO_BATCHES} micro-batches a step: with the comparison of idle "
            f"ranks {median:.4f} of the CPU time without it ({low:.4f} to {high:.4f})",
            flush=True,
        )
    if arguments.idle:
        return
    for name in arguments.models if arguments.repetition else ():
        for num in (1, 4):
            costs = repetition(name, num, arguments.repetition)
            low, median, high = (f"{each:.2%}" for each in statistics.quantiles(costs, n=4))
            print(
                f"{name}, {num} micro-batches a step: repetitions cost {median} ({low} to {high}) of CPU time",
                flush=True,
            )
    for name in () if arguments.repetition else arguments.models:
        seconds, _ = measure(arguments.procs, name, FORMS, arguments.steps)
        usual_s, exact_s = (statistics.median(seconds[form]) for form in FORMS)
        ratio = statistics.median(
            exact / usual for usual, exact in zip(seconds["usual"], seconds["exact"], strict=True)
        )
        cpu_ratio = statistics.median(seconds["exact cpu"]) / statistics.median(seconds["usual cpu"])
        memory = {form: measure(arguments.procs, name, (form,), 10)[1] for form in FORMS}
        print(
            f"{name}, {arguments.procs} processes: usual {usual_s * 1e3:.1f} ms, exact {exact_s * 1e3:.1f} ms a step, "
            f"ratio {ratio:.3f}, of CPU time {cpu_ratio:.3f}; "
            f"peak memory {memory['usual']:.0f} and {memory['exact']:.0f} MiB, "
            f"ratio {memory['exact'] / memory['usual']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
