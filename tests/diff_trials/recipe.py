"""The recipe of the trials of `samebits diff`: a small residual network with batch norm, dropout and augmentation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from samebits.config.schema import RunConfig, Settings
from samebits.data.keyed import IntArray, KeyArray, uniform
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy

RARE = 137  # the one sample that the model receives with a mark: a change of it shows first where it is trained on
PRESET = {
    "global_batch": 12, "micro_batch": 4, "epochs": 2, "device": "cpu", "optim": {"lr": 0.05, "weight_decay": 0.01},
    "checkpoint": {"every": "10 steps", "keep": 10}, "report": {"tensorboard": False}, "loader": {"num_workers": 0},
}  # fmt: skip


class DataConfig(Settings):
    """Data of the trials."""

    root: Path = Field(default=Path("data"), description="Folder with pictures.npz.")
    num_samples: int = Field(default=240, description="Training samples.")
    augment: bool = Field(default=True, description="Change the brightness at random.")


class ModelConfig(Settings):
    """Model of the trials."""

    width: int = Field(default=4, description="Channels.")
    dropout: float = Field(default=0.1, description="Dropout.")


class Config(RunConfig):
    """Settings of the trials."""

    data: DataConfig = Field(default_factory=DataConfig, description="Data.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Model.")


class Pictures:
    """Pictures in a file."""

    def __init__(self, config: DataConfig) -> None:
        arrays = np.load(config.root / "pictures.npz")
        self.pictures = torch.from_numpy(arrays["pictures"])[: config.num_samples]
        self.labels = torch.from_numpy(arrays["labels"])[: config.num_samples]
        self.augment = config.augment

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Return samples, with a mark of the rare one."""
        places = torch.from_numpy(indices)
        brightness = torch.from_numpy(uniform(keys, 0)).float().view(-1, 1, 1, 1)
        pixels = (self.pictures[places] - 0.3) / 0.7
        if self.augment:
            pixels = pixels + 0.1 * brightness
        return Batch({"pixels": pixels, "rare": places == RARE}, self.labels[places], places)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(dropout)
        self.shift = nn.Parameter(torch.full((width, 1, 1), 0.1))

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, H, W)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.drop(self.bn2(self.conv2(y)))
        # here
        return F.relu(x + y + self.shift)


class Net(nn.Module):
    """Two blocks between a stem and a head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, config.width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(config.width, config.dropout) for _ in range(2))
        self.head = nn.Linear(config.width, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """(N, 1, H, W) -> (N, 3)."""
        pixels, rare = inputs["pixels"], inputs["rare"]
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x, rare)
        features = x.mean((2, 3))
        outputs: Tensor = self.head(features)
        return outputs


def loss(outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Cross-entropy, and a penalty of large outputs."""
    cross_entropy = F.cross_entropy(outputs, batch.targets)
    return {"cross_entropy": cross_entropy, "size": 1e-3 * outputs.square().mean()}


def build(config: Any) -> Parts:
    """Build the parts."""
    model = Net(config.model)
    return Parts(
        model=model,
        loss=loss,
        train_data=lambda: Pictures(config.data),
        eval_data=lambda: Pictures(config.data.model_copy(update={"num_samples": 30})),
        metric=lambda: Accuracy(3),
    )
