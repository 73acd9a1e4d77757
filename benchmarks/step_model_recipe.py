"""Networks for `step_model.py`, on synthetic images, by STEP_MODEL.

cnn, resnet     0.4 MB of gradient; ResNet-18 without its last stage, 11 MB
small, large    the same sizes in one linear layer; instead of computing, a micro-batch sleeps for STEP_SLEEP_MS
"""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchvision.models.resnet import BasicBlock, ResNet

from samebits import Accuracy, Batch, DatasetSamples, Parts, RunConfig

SLEEP_S = float(os.environ.get("STEP_SLEEP_MS", "0")) / 1e3
LINEAR = {"small": 32, "large": 900}
PRESET = {"global_batch": 64, "micro_batch": 8, "epochs": 1000, "optim": {"lr": 0.01}}
NUM_SAMPLES, NUM_CLASSES, SIZE_PX = 1024, 10, 32


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Cross entropy."""
    time.sleep(SLEEP_S)
    return {"loss": F.cross_entropy(outputs, batch.targets)}


def model() -> nn.Module:
    """Return the network that STEP_MODEL names."""
    name = os.environ.get("STEP_MODEL", "cnn")
    if name in LINEAR:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE_PX**2, LINEAR[name]))
    if name == "resnet":
        network = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=NUM_CLASSES)
        network.layer4, network.fc = nn.Identity(), nn.Linear(256, NUM_CLASSES)
        return network
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip


def build(config: RunConfig) -> Parts:
    """The network and random images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 3, SIZE_PX, SIZE_PX, generator=generator)
    samples = TensorDataset(images, torch.arange(NUM_SAMPLES) % NUM_CLASSES)
    return Parts(
        model=model(),
        loss=loss,
        train_data=lambda: DatasetSamples(samples),
        eval_data=lambda: DatasetSamples(TensorDataset(*samples[:16])),
        metric=lambda: Accuracy(NUM_CLASSES),
        input_shape=(3, SIZE_PX, SIZE_PX),
    )
