"""Settings of the mnist recipe, in addition to the shared settings."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from samebits.config.schema import RunConfig, Settings
from samebits.recipes.vision_config import Count


class DataConfig(Settings):
    """The dataset."""

    name: Literal["mnist", "digits"] = Field(
        default="mnist",
        description="Dataset. mnist: 60,000 + 10,000 images of 28x28; digits: 1,437 + 360 images of 8x8, which "
        "come with Samebits.",
    )
    root: Path = Field(
        default=Path("~/.cache/samebits/mnist"),
        description="Folder with the four IDX files of MNIST: plain or .gz.",
    )
    download: bool = Field(
        default=True, description="Download MNIST into data.root if files are missing."
    )
    shift_px: int = Field(
        default=0,
        ge=0,
        le=4,
        description="Largest random shift of a training image in x and y, in pixels.",
    )
    num_train: Count | None = Field(
        default=None, description="Use the first N training images. null: all."
    )
    num_eval: Count | None = Field(
        default=None, description="Use the first N validation images. null: all."
    )


class ModelConfig(Settings):
    """The network."""

    name: Literal["cnn", "tutorial"] = Field(
        default="cnn",
        description="Network. cnn: five convolutions with batch norm; tutorial: the 21,840-parameter network of many "
        "tutorials.",
    )
    width: int = Field(
        default=16,
        ge=1,
        description="Channels of the first convolution of cnn; the last has 4 times as many.",
    )
    dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Dropout probability before the classifier of cnn."
    )


class Config(RunConfig):
    """All settings of a run of the mnist recipe."""

    data: DataConfig = Field(default=DataConfig(), description="Dataset.")
    model: ModelConfig = Field(default=ModelConfig(), description="Network.")
