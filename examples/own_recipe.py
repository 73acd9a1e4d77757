"""Your own recipe: any torch dataset and any module, trained by `samebits train`.

samebits train examples/own_recipe.py --procs 2
samebits train examples/own_recipe.py model.width=32 epochs=5 optim.lr=0.1
samebits config examples/own_recipe.py
"""

import sklearn.datasets
import torch.nn.functional as F
from pydantic import Field
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2 as transforms

from samebits import Accuracy, DatasetSamples, Parts, RunConfig, Settings

# Defaults that differ from Samebits's. A YAML file or the command line overrides them.
PRESET = {"epochs": 3, "global_batch": 64, "micro_batch": 16, "optim": {"lr": 0.05, "schedule": "cosine"}}


class ModelConfig(Settings):
    width: int = Field(default=16, ge=1, description="channels of the convolution")


class Config(RunConfig):
    model: ModelConfig = Field(default_factory=ModelConfig, description="the network")


class Digits(Dataset):
    """A map-style dataset with a random transform, as for any other loop."""

    def __init__(self, first, last, transform):
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        self.images = images[first:last].reshape(-1, 8, 8).astype("float32") / 16
        self.labels, self.transform = labels[first:last], transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), int(self.labels[index])


def build(config):
    width = config.model.width
    model = nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(36 * width, 10),
    )
    plain = transforms.ToImage()
    augmented = transforms.Compose([plain, transforms.RandomAffine(degrees=10, translate=(0.1, 0.1))])
    return Parts(
        model=model,
        loss=lambda outputs, batch: {"cross_entropy": F.cross_entropy(outputs, batch.targets)},
        # The transform's random numbers are a function of (seed, epoch, index): equal on any rank, in any worker.
        train_data=lambda: DatasetSamples(Digits(0, 1437, augmented)),
        eval_data=lambda: DatasetSamples(Digits(1437, 1797, plain)),
        metric=lambda: Accuracy(10),
        monitor=("top1", "max"),
    )
