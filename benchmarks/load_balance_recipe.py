"""The job of `load_balance.py`: a small network, 24 micro-batches a step. Pins each rank to its own core."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samebits import Accuracy, Batch, DatasetSamples, Parts, RunConfig

NUM_STEPS = int(os.environ.get("BALANCE_STEPS", "120"))
GLOBAL_BATCH, MICRO_BATCH = 384, 16
PRESET = {
    "global_batch": GLOBAL_BATCH,
    "micro_batch": MICRO_BATCH,
    "epochs": 1,
    "device": "cpu",
    "report": {"every_steps": 1, "tensorboard": False},
    "record": {"steps": False},
}


def network() -> nn.Module:
    """Images (N, 3, 32, 32) -> logits (N, 10)."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))


def pictures() -> TensorDataset:
    """Random images (N, 3, 32, 32) and classes."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_STEPS * GLOBAL_BATCH, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(0, 10, (len(images),), generator=generator))


def pin() -> None:
    """Keep this rank on the core of its number."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Cross entropy."""
    return {"loss": F.cross_entropy(outputs, batch.targets)}


def build(config: RunConfig) -> Parts:
    """The network and random images."""

    def train_data() -> DatasetSamples:
        if dist.is_initialized():
            pin()
        return DatasetSamples(pictures())

    return Parts(
        model=network(),
        loss=loss,
        train_data=train_data,
        eval_data=lambda: DatasetSamples(TensorDataset(*pictures()[:16])),
        metric=lambda: Accuracy(10),
    )
