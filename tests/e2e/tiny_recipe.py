"""A recipe as a user would write it, in one file: a network with batch norm and dropout on synthetic images."""

import os
import time

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from samebits.config.schema import RunConfig, Settings
from samebits.data.keyed import uniform
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.metrics.classification import Accuracy

PRESET = {"global_batch": 24, "micro_batch": 4, "epochs": 2, "eval_batch": 10, "optim": {"lr": 0.05}}


class DataConfig(Settings):
    num_samples: int = Field(default=101, description="training samples")
    bad_sample: int | None = Field(default=None, description="a sample that is not a number")
    slow_s: float = Field(default=0.0, description="seconds that a batch takes to read")
    slow_sample_s: float = Field(default=0.0, description="seconds that a sample takes to read")
    slow_while: str = Field(default="", description="slow only while this file is there")
    eval_slow_s: float = Field(default=0.0, description="the same, in evaluation")


class ModelConfig(Settings):
    width: int = Field(default=6, description="channels")


class Config(RunConfig):
    data: DataConfig = Field(default_factory=DataConfig, description="made-up pictures")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the network")


class Pictures:
    def __init__(self, num_samples, bad_sample=None, slow_s=0.0, slow_while="", slow_sample_s=0.0):
        generator = torch.Generator().manual_seed(num_samples)
        self.labels = torch.randint(0, 3, (num_samples,), generator=generator)
        self.pictures = torch.randn(num_samples, 1, 6, 6, generator=generator)
        self.pictures += self.labels.view(-1, 1, 1, 1)
        if bad_sample is not None:
            self.pictures[bad_sample] = float("nan")
        self.slow_s, self.slow_while, self.slow_sample_s = slow_s, slow_while, slow_sample_s

    def __len__(self):
        return len(self.labels)

    def batch(self, indices, keys):
        if not self.slow_while or os.path.exists(self.slow_while):
            time.sleep(self.slow_s + self.slow_sample_s * len(indices))
        places = torch.from_numpy(indices)
        brightness = torch.from_numpy(uniform(keys, 0)).float().view(-1, 1, 1, 1)
        return Batch(self.pictures[places] + 0.1 * brightness, self.labels[places], places)


def loss(outputs, batch):
    return {"cross_entropy": F.cross_entropy(outputs, batch.targets), "size": 1e-3 * outputs.square().mean()}


def build(config):
    width = config.model.width
    model = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(16 * width, 3),
    )  # fmt: skip
    data = config.data
    return Parts(
        model=model,
        loss=loss,
        train_data=lambda: Pictures(
            data.num_samples, data.bad_sample, data.slow_s, data.slow_while, data.slow_sample_s
        ),
        eval_data=lambda: Pictures(37, slow_s=data.eval_slow_s),
        metric=lambda: Accuracy(3),
        describe={"data": "made up"},
    )
