"""Models and data sets that ask more of the engine than the tutorials' do, one by `data.kind`."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from samebits import DatasetSamples, Parts
from samebits.config.schema import RunConfig, Settings
from samebits.metrics.classification import Accuracy

PRESET = {"global_batch": 24, "micro_batch": 4, "epochs": 2, "optim": {"lr": 0.05, "momentum": 0.9}}


class DataConfig(Settings):
    kind: str = Field(default="mask", description="which")
    num_samples: int = Field(default=53, description="training samples")


class Config(RunConfig):
    data: DataConfig = Field(default_factory=DataConfig, description="data")


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last = nn.Linear(27, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.triu(torch.full((16, 16), -math.inf), 1))
        if kind == "gaps":  # a low-rank factor cut out of a larger matrix, as people start one
            self.last.weight = nn.Parameter(torch.randn(3, 32)[:, :16])
        if kind == "conv3d":
            self.conv = nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, inputs):
        if self.kind == "conv3d":
            inputs = self.conv(inputs.view(-1, 1, 3, 3, 3)).sum(1).flatten(1)
        hidden = F.relu(self.norm(self.first(inputs)))
        attention = torch.softmax(hidden.unsqueeze(1) + self.mask, dim=-1)
        return self.last((attention * hidden.unsqueeze(1)).sum(-1))


def build(config):
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 3, (100,), generator=generator)
    everything = TensorDataset(torch.randn(100, 27, generator=generator) + labels[:, None], labels)

    def part(train):
        if config.data.kind == "numpy-split":
            places = np.random.permutation(100)
            return Subset(everything, places[:53] if train else places[53:])
        if config.data.kind == "torch-split":
            return random_split(everything, [53, 47])[0 if train else 1]
        return Subset(everything, range(config.data.num_samples) if train else range(60, 100))

    return Parts(
        model=Net(config.data.kind),
        loss=lambda outputs, batch: {"cross_entropy": F.cross_entropy(outputs, batch.targets)},
        train_data=lambda: DatasetSamples(part(True)),
        eval_data=lambda: DatasetSamples(part(False)),
        metric=lambda: Accuracy(3),
    )
