"""The settings of the mnist recipe, beside those that all recipes share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.schema import RunConfig, Settings

Count = Annotated[int, Field(ge=1)]


class DataConfig(Settings):
    """Which pictures of digits."""

    name: Literal["mnist", "digits"] = Field(
        default="mnist",
        description="mnist: 60,000 + 10,000 pictures of 28x28; digits: 1,437 + 360 of 8x8 that come with scikit-learn",
    )
    root: Path = Field(
        default=Path("~/.cache/lockstep/mnist"),
        description="folder with MNIST's four IDX files, plain, .gz or .xz; downloaded to it if they are not there",
    )
    download: bool = Field(default=True, description="fetch MNIST when root does not hold it")
    shift_px: int = Field(
        default=0, ge=0, le=4, description="training pictures move at random by up to so many pixels each way"
    )
    num_train: Count | None = Field(default=None, description="use only the first N training pictures; null: all")
    num_eval: Count | None = Field(default=None, description="use only the first N held-out pictures; null: all")


class ModelConfig(Settings):
    """Which network."""

    name: Literal["cnn", "tutorial"] = Field(
        default="cnn",
        description="cnn: five convolutions with batch norm; tutorial: the 21,840-parameter net of many tutorials",
    )
    width: int = Field(
        default=16, ge=1, description="channels of the first convolution; the last has 4 times as many (cnn)"
    )
    dropout: float = Field(default=0.1, ge=0, lt=1, description="share of features dropped before the classifier (cnn)")


class Config(RunConfig):
    """All settings of a run of the mnist recipe."""

    data: DataConfig = Field(default=DataConfig(), description="which pictures of digits")
    model: ModelConfig = Field(default=ModelConfig(), description="which network")
