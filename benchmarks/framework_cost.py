"""Overhead of Samebits's step: its step time minus forward, backward and optimizer in plain PyTorch.

    python benchmarks/framework_cost.py                          # ResNet-34, batch 16, 224 px
    python benchmarks/framework_cost.py --size-px 128 --rounds 9

One process, one thread, images in memory as bytes. Both run the same network, channels last, with the same fused SGD,
and take turns of one step. Samebits's step is that of its loop: its loader, the normalization of the batch, its
reducer with the gradient norm, and the checks for non-finite values. The plain step gets a prepared batch. Prints CPU
time of the process: the median over the rounds, and the median of the rounds' differences.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from samebits.cluster.world import alone
from samebits.data.keyed import IntArray, KeyArray
from samebits.data.samples import Batch
from samebits.engine.assemble import make_job
from samebits.engine.parts import Parts
from samebits.engine.step import run_step
from samebits.metrics.classification import Accuracy
from samebits.recipes.classify.config import Config
from samebits.recipes.classify.data import Normalise
from samebits.recipes.classify.model import build_model


class InMemory:
    """Random images."""

    def __init__(self, config: Config, count: int) -> None:
        size_px = config.data.size_px
        self.images = torch.from_numpy(
            np.random.default_rng(0).integers(0, 256, (count, size_px, size_px, 3), np.uint8)
        )
        self.normalise = Normalise(config.data, config.data.size_px)

    def __len__(self) -> int:
        return 10**6

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Return the same images for any indices."""
        return Batch(self.images, torch.arange(len(indices)) % 5, torch.from_numpy(indices))

    def finish(self, batch: Batch) -> Batch:
        """Normalize as the recipe's samples do."""
        return Batch(self.normalise(batch.inputs), batch.targets, batch.indices)


def plain(config: Config, batch: int) -> Callable[[], None]:
    model = build_model(config.model, 5).to(memory_format=torch.channels_last)
    samples = InMemory(config, batch)
    inputs, targets = samples.normalise(samples.images), torch.arange(batch) % 5
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def samebits(config: Config, batch: int) -> Callable[[], None]:
    samples = InMemory(config, batch)
    parts = Parts(
        model=build_model(config.model, 5),
        loss=lambda outputs, batch: {"loss": F.cross_entropy(outputs, batch.targets)},
        train_data=lambda: samples,
        eval_data=lambda: samples,
        metric=lambda: Accuracy(5),
    )
    job = make_job(config, lambda: parts, alone("cpu"))
    loader, steps = job.open_loader(10**6)
    return lambda: run_step(job, next(steps), loader, 0.0) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--size-px", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = Config.model_validate(
        {
            "recipe": "classify",
            "device": "cpu",
            "global_batch": arguments.batch,
            "micro_batch": arguments.batch,
            "data": {"size_px": arguments.size_px},
            "model": {"name": arguments.model},
            "optim": {"lr": 1e-3, "momentum": 0.9},
        }
    )
    ways = {"plain PyTorch": plain(config, arguments.batch), "Samebits": samebits(config, arguments.batch)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        # Each is first in every second round.
        for name in list(ways)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            ways[name]()
            if number:  # the first round warms up
                times[name].append(time.process_time() - start)
    for name, taken in times.items():
        print(
            f"{name:14} {statistics.median(taken) * 1e3:8.1f} ms of CPU time a step, {min(taken) * 1e3:8.1f} at least"
        )
    first, second = times.values()
    cost = statistics.median(ours / theirs - 1 for theirs, ours in zip(first, second, strict=True))
    print(f"{arguments.model}, batch {arguments.batch}, {arguments.size_px} px: {cost:+.1%}")


if __name__ == "__main__":
    main()
