"""A recipe whose steps are nearly all communication: one linear layer, trivial data. `link.py` trains it."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samebits import Accuracy, Batch, DatasetSamples, Parts, RunConfig

WIDTH = int(os.environ.get("LINK_WIDTH", "1500"))
PRESET = {"global_batch": 8, "micro_batch": 4, "epochs": 1, "report": {"every_steps": 1, "tensorboard": False}}


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Cross entropy."""
    return {"loss": F.cross_entropy(outputs, batch.targets)}


def build(config: RunConfig) -> Parts:
    """WIDTH * WIDTH parameters."""
    samples = TensorDataset(torch.randn(120, WIDTH), torch.zeros(120, dtype=torch.int64))
    return Parts(
        model=nn.Linear(WIDTH, WIDTH, bias=False),
        loss=loss,
        train_data=lambda: DatasetSamples(samples),
        eval_data=lambda: DatasetSamples(TensorDataset(*samples[:1])),
        metric=lambda: Accuracy(WIDTH),
    )
