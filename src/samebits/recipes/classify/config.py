"""Settings of the classify recipe, in addition to the shared settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from samebits.config.given import check_exists
from samebits.config.schema import RunConfig, Settings
from samebits.errors import DataError
from samebits.metrics.eval_sets import check_set_names
from samebits.recipes.network_config import NetworkConfig
from samebits.recipes.vision_config import CROP_AREA, Share, VisionData

PositiveShare = Annotated[float, Field(gt=0, le=1)]

# Networks of torchvision.
RESNETS = (
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d",
    "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2",
)  # fmt: skip


class DataConfig(VisionData):
    """The dataset and the augmentation."""

    root: Path | None = Field(
        default=None,
        description="Folder with one subfolder of images per class; a CSV file of path,label; tar shards or "
        "Parquet files. Without data.eval, data.val_fraction of each class is the "
        "validation split.",
    )
    eval_sets: dict[str, Path] = Field(
        default={},
        description="Further validation sets by name, as data.eval: {night: DIR} adds the metric night.top1.",
    )
    images: Path | None = Field(
        default=None,
        description="Folder that paths in CSV files are relative to. null: the folder of each CSV file.",
    )
    columns: tuple[str, str] | None = Field(
        default=None,
        description="Columns of image and class in Parquet files; extensions in tar shards. "
        "null: the usual names, such as image and label, or jpg and cls.",
    )
    classes: tuple[str, ...] | None = Field(
        default=None,
        description="Classes, in the order of the model's outputs. null: all, sorted by name, but by value if all are "
        "whole numbers in a CSV file or rows.",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="Unreadable images. stop: end the run; skip: read all images before training and leave these out.",
    )
    size_px: int = Field(
        default=224, ge=8, le=4096, description="Side of the model's square input, in pixels."
    )
    train_px: Annotated[int, Field(ge=8, le=4096)] | None = Field(
        default=None,
        description="Side of training crops, in pixels. Smaller crops train faster, and often better. null: size_px.",
    )
    eval_resize_px: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        default=None,
        description="Shorter side before the center crop in evaluation, in pixels. null: size_px * 256 / 224.",
    )
    crop_area: tuple[Share, Share] = Field(default=(0.08, 1.0), description=CROP_AREA)
    mean: tuple[Share, Share, Share] = Field(
        default=(0.485, 0.456, 0.406),
        description="Mean of red, green and blue for normalization, in 0 to 1.",
    )
    std: tuple[PositiveShare, PositiveShare, PositiveShare] = Field(
        default=(0.229, 0.224, 0.225),
        description="Standard deviation of red, green and blue for normalization.",
    )
    scaled_decode: bool = Field(
        default=True,
        description="Decode JPEG files at 1/2, 1/4 or 1/8 of their size where the crop allows it, which is faster.",
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "DataConfig":
        if self.eval_resize_px is not None and self.eval_resize_px < self.size_px:
            raise ValueError(
                f"eval_resize_px ({self.eval_resize_px}) must be at least size_px ({self.size_px})"
            )
        return self


class AugmentConfig(Settings):
    """Augmentation of training images beyond random crops and flips, by torchvision.transforms.v2."""

    policy: Literal["randaugment", "trivialaugment_wide"] | None = Field(
        default=None,
        description="Random operations on each image: RandAugment or TrivialAugmentWide. null: none.",
    )
    num_ops: int = Field(
        default=2, ge=1, le=14, description="Operations on each image (randaugment)."
    )
    magnitude: int = Field(
        default=9, ge=0, le=30, description="Strength of the operations, 0 to 30 (randaugment)."
    )
    brightness: float = Field(
        default=0.0, ge=0, description="Largest relative change of brightness (color jitter)."
    )
    contrast: float = Field(
        default=0.0, ge=0, description="Largest relative change of contrast (color jitter)."
    )
    saturation: float = Field(
        default=0.0, ge=0, description="Largest relative change of saturation (color jitter)."
    )
    hue: float = Field(
        default=0.0, ge=0, le=0.5, description="Largest shift of the hue, in turns (color jitter)."
    )
    erasing: Share = Field(
        default=0.0, description="Probability that a random rectangle of an image is erased."
    )
    erasing_fill: Literal["mean", "noise"] = Field(
        default="mean",
        description="Content of an erased rectangle: the mean color, or normal noise for each pixel.",
    )
    mixup: float = Field(
        default=0.0,
        ge=0,
        description="Alpha of MixUp within a micro-batch, such as 0.2. 0: no MixUp.",
    )
    cutmix: float = Field(
        default=0.0,
        ge=0,
        description="Alpha of CutMix within a micro-batch, such as 1.0. 0: no CutMix.",
    )
    mix_probability: Share = Field(
        default=1.0,
        description="Probability that a micro-batch is mixed. With mixup and cutmix, each is used for half of these.",
    )


class ModelConfig(NetworkConfig):
    """The network and its initial weights."""

    KNOWN = RESNETS
    LIBRARIES = ("timm/", "torchvision/")

    name: str = Field(
        default="resnet34",
        description=f"Network: {', '.join(RESNETS)}; others of torchvision as torchvision/NAME; or timm/NAME if "
        "timm is installed.",
    )
    weights: Literal["pretrained"] | Path | None = Field(
        default=None,
        description="Pretrained weights: a file (.pth, .pt, .pth.tar or .safetensors); or pretrained: those published "
        "for the network, from the library's cache or downloaded into it. The head may have another size.",
    )
    drop_path: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Stochastic depth: probability that a sample skips the last residual block; earlier blocks are "
        "skipped less often, in proportion. For networks of timm, and those of torchvision that have it.",
    )


class LossConfig(Settings):
    """The loss."""

    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Fraction of the target probability that is spread over all classes.",
    )


class Config(RunConfig):
    """All settings of a run of the classify recipe."""

    data: DataConfig = Field(default=DataConfig(), description="Dataset and augmentation.")
    augment: AugmentConfig = Field(
        default=AugmentConfig(),
        description="Augmentation beyond random crops and flips, by torchvision.transforms.v2.",
    )
    model: ModelConfig = Field(default=ModelConfig(), description="Network and initial weights.")
    loss: LossConfig = Field(default=LossConfig(), description="Loss.")

    def check_inputs(self) -> None:
        """Check that data is set, and that its files and folders exist."""
        data = self.data
        if data.path(train=True) is None:
            raise no_dataset()
        for name in ("root", "train", "eval", "images"):
            check_dataset(f"data.{name}", getattr(data, name))
        check_set_names(data.eval_sets, "data.eval_sets")
        for name, path in data.eval_sets.items():
            check_dataset(f"data.eval_sets.{name}", path)


def no_dataset() -> DataError:
    """Return the error for settings that name no dataset."""
    return DataError(
        "no dataset is set: data.root and data.train are null",
        fix="Set data.root=DIR, a folder with one subfolder of images per class,\n"
        "or set data.train and data.eval to such folders or to CSV files of path,label.\n"
        "To try without a dataset, run: samebits data make classify --out DIR",
    )


def check_dataset(setting: str, path: Path | None) -> None:
    """Check that the path of a setting exists, unless it is a pattern of tar shards or Parquet files.

    Raises:
        DataError: It does not exist.
    """
    if path is None or not set("*?{") & set(path.name):
        check_exists(setting, path)


class MakeConfig(Settings):
    """A synthetic dataset."""

    num_per_class: int = Field(default=100, ge=2, description="Images of each of the five classes.")
    size_px: int = Field(
        default=160, ge=24, le=2048, description="Longer side of an image, in pixels."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the random images.")
