"""The settings of the classify recipe, beside those that all recipes share."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config.given import check_exists
from lockstep.config.schema import RunConfig, Settings

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]

# Those of torchvision.
RESNETS = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)


class DataConfig(Settings):
    """Which pictures, and what is done to them before the model sees them."""

    root: Path | None = Field(
        default=None,
        description="folder with a folder of pictures for each class; a share of each class is held out, unless eval "
        "is given",
    )
    train: Path | None = Field(
        default=None, description="instead of root: class folders to train on, or a CSV file of path,label"
    )
    eval: Path | None = Field(
        default=None, description="with root or train: class folders that are held out, or such a CSV file"
    )
    images: Path | None = Field(
        default=None, description="folder of the pictures that CSV files name; null: the folder of each CSV file"
    )
    eval_share: float = Field(default=0.2, gt=0, lt=1, description="share of each class that is held out of root")
    classes: tuple[str, ...] | None = Field(
        default=None, description="the classes, in the model's order; null: all that are found, by name"
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="on a picture that can't be read: stop; or skip: all are read before training, and those left out",
    )
    size_px: int = Field(default=224, ge=8, le=4096, description="side of the square that the model sees")
    eval_resize_px: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        default=None, description="length of the shorter side before the middle is cut out; null: size_px * 256 / 224"
    )
    crop_area: tuple[Share, Share] = Field(
        default=(0.08, 1.0), description="least and largest share of a picture's area that training sees at a time"
    )
    crop_ratio: tuple[Positive, Positive] = Field(
        default=(0.75, 1.3333), description="least and largest width / height of that part"
    )
    flip: Share = Field(default=0.5, description="probability that a training picture is mirrored left to right")
    mean: tuple[Share, Share, Share] = Field(
        default=(0.485, 0.456, 0.406), description="taken off red, green and blue, with full brightness as 1"
    )
    std: tuple[PositiveShare, PositiveShare, PositiveShare] = Field(
        default=(0.229, 0.224, 0.225), description="by which they are divided then"
    )
    scaled_decode: bool = Field(
        default=True, description="read JPEG files at 1/2, 1/4 or 1/8 of their size where that is still enough"
    )
    cache: Path | None = Field(
        default=None, description="folder for decoded pictures, filled while training; changes no result; null: none"
    )
    cache_gb: float = Field(default=10.0, gt=0, description="the most that folder may hold, gigabytes")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> DataConfig:
        if self.root is not None and self.train is not None:
            raise ValueError("root and train both say what is trained on: give one of them")
        if self.train is not None and self.eval is None:
            raise ValueError("train needs eval, which says what is held out; a share is held out of root only")
        if self.eval is not None and self.train is None and self.root is None:
            raise ValueError("eval needs train or root, which say what is trained on")
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} must be the least, then the largest")
        if self.crop_area[1] == 0:
            raise ValueError("crop_area must be above 0")
        if self.eval_resize_px is not None and self.eval_resize_px < self.size_px:
            raise ValueError(f"eval_resize_px ({self.eval_resize_px}) is less than size_px ({self.size_px})")
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise ValueError("classes names one twice")
        return self


class ModelConfig(Settings):
    """Which network, and what it starts from."""

    name: str = Field(
        default="resnet34",
        description=f"torchvision's {', '.join(RESNETS)}; or timm/NAME where timm is installed",
    )
    weights: Path | None = Field(
        default=None,
        description="file to start from: .pth, .pt, .pth.tar or .safetensors; the head may be of other size",
    )
    freeze: Literal["backbone"] | tuple[str, ...] = Field(
        default=(),
        description="what stays as it is: backbone (all but the head), or patterns such as [conv1, layer1.*]",
    )
    zero_init_residual: bool = Field(
        default=False, description="start with each residual branch at zero, which helps large batches (ResNets)"
    )

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name in RESNETS or name.startswith("timm/"):
            return name
        near = difflib.get_close_matches(name, RESNETS, n=1)
        raise ValueError(f"must be one of the names below; fix: Use model.name={near[0] if near else RESNETS[0]}.")


class LossConfig(Settings):
    """What is minimised."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="share of the target spread over all classes")


class Config(RunConfig):
    """All settings of a run of the classify recipe."""

    data: DataConfig = Field(default=DataConfig(), description="which pictures")
    model: ModelConfig = Field(default=ModelConfig(), description="which network")
    loss: LossConfig = Field(default=LossConfig(), description="what is minimised")

    def check_inputs(self) -> None:
        """Check that data is set, and that its files and folders exist."""
        data = self.data
        if data.root is None and data.train is None:
            from lockstep.recipes.classify.listing import find_pictures

            find_pictures(data, self.seed)  # raises the error, with what to set
        for name in ("root", "train", "eval", "images"):
            check_exists(f"data.{name}", getattr(data, name))


class MakeConfig(Settings):
    """A made-up data set."""

    num_per_class: int = Field(default=100, ge=2, description="pictures of each of the five classes")
    size_px: int = Field(default=160, ge=24, le=2048, description="length of a picture's longer side")
    seed: int = Field(default=0, ge=0, lt=2**63, description="chooses the pictures")
