"""One process of `link.py`: trains a model in several ways by turns, and prints what each has taken as a JSON line."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.exact_cost import place
from samebits.cluster.env import read_assignment
from samebits.cluster.world import World, join
from samebits.data.order import MicroBatch, Order
from samebits.parallel.reduce import Reducer
from samebits.storage.weights import weights_sha256


def build(name: str) -> tuple[nn.Module, int, int]:
    """Return a model, and the channels and size of its pictures."""
    torch.manual_seed(0)
    if name.startswith("resnet18-"):
        import torchvision

        return torchvision.models.resnet18(num_classes=10), 3, int(name.partition("-")[2])
    sizes = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*sizes, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)), 1, 28


class Training:
    """A model that trains in one of the modes of `link.py`, each with its own copy of the weights.

    Args:
        images: In a micro-batch.
        micro_batches: In a step of all ranks.
    """

    def __init__(self, name: str, mode: str, world: World, images: int, micro_batches: int, steps: int) -> None:
        self.model, channels, size = build(name)
        self.mode, self._world = mode, world
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, fused=True)
        self._batch = batch = images * micro_batches
        self._inputs = torch.randn(batch, channels, size, size)
        self._targets = torch.arange(batch) % 10
        order = Order(batch * steps, batch, images, is_shuffled=False)
        self._plans = list(order.steps(world, stop=steps))
        if mode == "ddp":
            self._ddp = DistributedDataParallel(self.model)
        elif mode != "local":
            self._reducer = Reducer(self.model, world)

    def step(self, number: int) -> None:
        """Run a step."""
        plan = self._plans[number]
        if self.mode in ("ddp", "local"):  # local: what a step takes without messages
            model = self._ddp if self.mode == "ddp" else self.model
            rows = torch.cat([self._rows(each) for each in plan.micro_batches])
            self._optimizer.zero_grad()
            F.cross_entropy(model(self._inputs[rows]), self._targets[rows]).backward()
        else:
            self._reducer.begin(plan)
            self._reducer.run(self._run)
            self._reducer.reduce()
        self._optimizer.step()

    def _run(self, each: MicroBatch) -> None:
        rows = self._rows(each)
        with self._reducer.micro_batch(each):
            self._reducer.backward(F.cross_entropy(self.model(self._inputs[rows]), self._targets[rows]))

    def _rows(self, each: MicroBatch) -> Tensor:
        return torch.from_numpy(each.indices % self._batch)


def bytes_sent() -> int:
    """Return the bytes that have left the interface eth0 of this network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:")), 0)


def measure(step: Callable[[], object]) -> tuple[float, int]:
    """Run a step, and return its seconds and the bytes that have left this machine."""
    dist.barrier()
    before = bytes_sent()
    dist.barrier()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    dist.barrier()
    return seconds, bytes_sent() - before


def run(name: str, modes: list[str], images: int, steps: int) -> None:
    torch.set_num_threads(1)
    assignment = read_assignment(os.environ)
    assert assignment is not None
    rank = int(os.environ["RANK"])
    with join(assignment, device="cpu") as world:
        micro_batches = int(os.environ["LINK_MICRO_BATCHES"])
        trainings = [Training(name, mode, world, images, micro_batches, steps) for mode in modes]
        found: dict[str, list[tuple[float, int]]] = {mode: [] for mode in modes}
        for number in range(steps):
            for each in trainings:  # by turns, so that a busy machine slows all of them
                # By rank, not local rank: the namespaces share the cores of this machine.
                place(rank, as_samebits=each.mode != "ddp")
                found[each.mode].append(measure(lambda: each.step(number)))  # noqa: B023 - called at once
    lines = {
        each.mode: {
            # Without the first step, in which memory is allocated.
            "seconds": statistics.median(seconds for seconds, _ in found[each.mode][1:]),
            "bytes": statistics.mean(num_bytes for _, num_bytes in found[each.mode][1:]),
            "hash": weights_sha256(each.model.state_dict())[:8],
        }
        for each in trainings
    }
    gradient = sum(4 * each.numel() for each in trainings[0].model.parameters())
    print("FOUND", json.dumps({"gradient": gradient, "modes": lines}), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4]))
