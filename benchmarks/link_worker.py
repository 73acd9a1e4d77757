"""One process of `link.py`: trains a model for some steps, and prints what its machine has sent as a JSON line."""

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

from samebits.cluster.env import read_assignment
from samebits.cluster.world import join
from samebits.data.order import MicroBatch, Order
from samebits.parallel.reduce import Reducer
from samebits.storage.weights import weights_sha256

MICRO_BATCH = 2


def build(name: str) -> tuple[nn.Module, int, int]:
    """Return a model, and the channels and size of its pictures."""
    torch.manual_seed(0)
    if name == "resnet18":
        import torchvision

        return torchvision.models.resnet18(num_classes=10), 3, 64
    sizes = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*sizes, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)), 1, 28


def bytes_sent() -> int:
    """Return the bytes that have left the interface eth0 of this network namespace."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("eth0:")), 0)


def measure(step: Callable[[int], object], num_steps: int) -> dict[str, float]:
    """Run steps, and return the median time and the mean bytes of all but the first one."""
    times = []
    for number in range(num_steps):
        dist.barrier()
        if number == 1:
            before = bytes_sent()
            dist.barrier()
        began = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - began)
    dist.barrier()
    return {"seconds": statistics.median(times[1:]), "bytes": (bytes_sent() - before) / (num_steps - 1)}


def run(name: str, mode: str, compress: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    model, channels, size = build(name)
    num_bytes = sum(4 * each.numel() for each in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batch = MICRO_BATCH * int(os.environ["LINK_MICRO_BATCHES"])
    inputs = torch.randn(batch, channels, size, size)
    targets = torch.arange(batch) % 10

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs[rows]), targets[rows])

    if mode == "ddp":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        share = batch // num_ranks

        def step(number: int) -> None:
            optimizer.zero_grad()
            loss(torch.arange(rank * share, (rank + 1) * share)).backward()
            optimizer.step()

        found = measure(step, num_steps)
        dist.destroy_process_group()
    else:
        assignment = read_assignment(os.environ)
        assert assignment is not None
        with join(assignment, device="cpu") as world:
            reducer = Reducer(model, world, compress=compress)
            plans = list(Order(batch * num_steps, batch, MICRO_BATCH, is_shuffled=False).steps(world, stop=num_steps))

            def body(each: MicroBatch) -> None:
                with reducer.micro_batch(each):
                    reducer.backward(loss(torch.from_numpy(each.indices % batch)))

            def step(number: int) -> None:
                reducer.begin(plans[number])
                reducer.run(body)
                reducer.reduce()
                optimizer.step()

            found = measure(step, num_steps)
    found |= {"gradient_bytes": num_bytes, "hash": weights_sha256(model.state_dict())[:8]}
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
