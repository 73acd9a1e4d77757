"""A recipe whose class names come from its data, whose inputs are dicts and which infers in a way of its own."""

from pathlib import Path

import torch
from PIL import Image
from pydantic import Field
from torch import nn

from samebits.config.schema import RunConfig, Settings
from samebits.data.samples import Batch
from samebits.engine.parts import Parts
from samebits.errors import DataError
from samebits.metrics.classification import Accuracy


class DataConfig(Settings):
    root: Path = Field(default=Path("dots"), description="folder with classes.txt")


class Config(RunConfig):
    data: DataConfig = Field(default_factory=DataConfig, description="dots")
    twice: bool = Field(default=False, description="infer twice")


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(2, num_classes)

    def forward(self, inputs):
        assert isinstance(inputs["name"], list)
        return self.head(self.norm(self.conv(inputs["picture"])).mean((2, 3)))


class Dots:
    """Pictures of any size, so a batch is one of them."""

    def __len__(self):
        return 6

    def batch(self, indices, keys):
        (index,) = indices.tolist()
        picture = torch.full((1, 1, 3 + index, 4), float(index))
        places = torch.from_numpy(indices)
        return Batch({"picture": picture, "name": [f"dot {index}"]}, places % 2, places)


def dataset_info(config):
    path = config.data.root / "classes.txt"
    if not path.is_file():
        raise DataError(f"{path} is not there")
    return {"classes": path.read_text().split()}


def build(config, dataset_info):
    def preprocess(path):
        if path.suffix != ".png":
            raise DataError(f"{path} is no picture of dots")
        with Image.open(path) as image:
            picture = torch.tensor([[image.convert("L").getpixel((0, 0)) / 255.0]])
        return {"picture": picture[None], "name": path.name}

    def answer(logits):
        return {"class": dataset_info["classes"][int(logits.argmax())], "scores": logits.tolist()}

    def loss(outputs, batch):
        return {"cross_entropy": nn.functional.cross_entropy(outputs, batch.targets)}

    return Parts(
        model=Net(len(dataset_info["classes"])),
        loss=loss,
        infer=(lambda model, inputs: 2 * model(inputs)) if config.twice else None,
        train_data=Dots,
        eval_data=Dots,
        metric=lambda: Accuracy(len(dataset_info["classes"])),
        preprocess=preprocess,
        postprocess=answer,
        draw_prediction=lambda path, answer: Image.new("RGB", (5, 5), "red"),
    )
