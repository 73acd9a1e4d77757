"""The task of all tools: one network, one dataset, one clock. Started as the hand-written jobs are.

N samples, C channels, H x W pixels
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

MEAN, STD = 0.1307, 0.3081
BATCH_A_PROCESS = 64
WARM_STEPS = 20


class Net(nn.Module):
    """The network of the tutorials: two convolutions and two linear layers, 21,840 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.drop2 = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 1, 28, 28) -> log-probabilities (N, 10)."""
        features = F.relu(F.max_pool2d(self.conv1(images), 2))
        features = F.relu(F.max_pool2d(self.drop2(self.conv2(features)), 2))
        hidden = F.dropout(F.relu(self.fc1(features.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(hidden), dim=1)


class Clock:
    """Records when steps end; rank 0 writes the times after the last one."""

    def __init__(self, rank: int, steps: int) -> None:
        self.rank, self.steps = rank, steps
        self.ends: list[float] = []

    def tick(self) -> None:
        """Record the end of an optimizer step. CPU only, so no work is pending."""
        self.ends.append(time.time())

    def write(self, loss: float, model: nn.Module) -> None:
        """Write the file that `mnist_peers.py` reads. Refuse a job with another number of steps."""
        if len(self.ends) != self.steps:
            raise SystemExit(f"this job took {len(self.ends)} steps, not {self.steps}")
        if self.rank != 0:
            return
        timed = self.steps - WARM_STEPS
        samples = timed * BATCH_A_PROCESS * int(os.environ["BENCH_PROCS"])
        facts = {
            "samples_per_s": samples / (self.ends[-1] - self.ends[WARM_STEPS - 1]),
            "first_step_s": self.ends[0] - float(os.environ["BENCH_STARTED"]),
            "loss": loss,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(facts))


def steps() -> int:
    """Return the number of steps of this job."""
    return int(os.environ["BENCH_STEPS"])


def start() -> None:
    """Set one thread and one seed, first in every job."""
    torch.set_num_threads(1)
    torch.manual_seed(1)


def pictures() -> Dataset[tuple[Tensor, int]]:
    """MNIST as the tutorials read it: decoded, scaled and normalized one image at a time."""
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    whole = datasets.MNIST(os.environ["BENCH_DATA"], train=True, download=False, transform=transform)
    return Subset(whole, range(steps() * BATCH_A_PROCESS * int(os.environ["BENCH_PROCS"])))


def in_memory() -> tuple[Tensor, Tensor]:
    """Return all images and labels as two tensors, ready for the network: (N, 1, 28, 28) and (N,)."""
    from torchvision import datasets

    whole = datasets.MNIST(os.environ["BENCH_DATA"], train=True, download=False)
    count = steps() * BATCH_A_PROCESS * int(os.environ["BENCH_PROCS"])
    images = (whole.data[:count, None].float() / 255 - MEAN) / STD
    return images, whole.targets[:count]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make the tutorials' optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
