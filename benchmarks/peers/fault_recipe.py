"""The same job as a Samebits recipe. Only the injected faults read the rank, from the environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fault_task import BATCH_A_PROCESS, EPOCHS, digits, network, pictures

from samebits import Accuracy, Batch, Parts, RunConfig

PRESET = {
    "global_batch": 2 * BATCH_A_PROCESS,
    "micro_batch": BATCH_A_PROCESS,
    "epochs": EPOCHS,
    "optim": {"lr": 0.05, "momentum": 0.9},
    "report": {"every_steps": 1, "tensorboard": False},
}


class Config(RunConfig):
    """No settings of its own."""


class Digits:
    """The images; faults occur in training only."""

    def __init__(self, train: bool) -> None:
        self.data, self.train = digits(), train
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]) -> Batch:
        """A micro-batch."""
        places = torch.from_numpy(indices)
        images, labels = self.data[places]
        if self.train:
            images = pictures(images, self.num_read)
            self.num_read += 1
        return Batch(images, labels, places)


def loss(outputs: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Cross-entropy."""
    return {"cross_entropy": F.cross_entropy(outputs, batch.targets)}


def build(config: Config) -> Parts:
    """The job."""
    return Parts(
        model=network(),
        loss=loss,
        train_data=lambda: Digits(True),
        eval_data=lambda: Digits(False),
        metric=lambda: Accuracy(10),
    )
