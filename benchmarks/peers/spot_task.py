"""Common parts of the jobs that torchrun starts in `benchmarks/spot.py`: its recipe's network and images, in torch.

An epoch has ten steps, and each job saves a checkpoint at its end. Variables SPOT_FOLDER, SPOT_GLOBAL_BATCH,
SPOT_NUM_SAMPLES and SPOT_SAMPLE_S come from the benchmark.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

STEPS_AN_EPOCH = 10


def folder() -> Path:
    """Return the folder of the job's files."""
    return Path(os.environ["SPOT_FOLDER"])


def batch_of_process(num_procs: int) -> int:
    """Return a process's share of the global batch."""
    return int(os.environ["SPOT_GLOBAL_BATCH"]) // num_procs


def images() -> TensorDataset:
    """Return the training images, (N, 1, 6, 6), and their labels: those of `tests/e2e/tiny_recipe.py`."""
    num_samples = int(os.environ["SPOT_NUM_SAMPLES"])
    generator = torch.Generator().manual_seed(num_samples)
    labels = torch.randint(0, 3, (num_samples,), generator=generator)
    pictures = torch.randn(num_samples, 1, 6, 6, generator=generator)
    return TensorDataset(pictures + labels.view(-1, 1, 1, 1), labels)


def network() -> nn.Module:
    """Make the recipe's network."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 3)
    )


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def read(batch: Tensor) -> Tensor:
    """Return a training batch after the time that its samples take."""
    time.sleep(len(batch) * float(os.environ["SPOT_SAMPLE_S"]))
    return batch + 0.1 * torch.rand(len(batch), 1, 1, 1)


def note(step: int) -> None:
    """Record the end of a step on rank 0."""
    if os.environ["RANK"] == "0":
        with (folder() / "steps").open("a", encoding="utf-8") as file:
            file.write(f"{step}\n")
