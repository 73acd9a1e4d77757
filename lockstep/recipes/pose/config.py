"""The settings of the pose recipe, beside those that all recipes share. Names in brackets: the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config.given import check_exists
from lockstep.config.schema import RunConfig, Settings
from lockstep.recipes.pose.skeletons import SKELETONS, Skeleton

Count = Annotated[int, Field(ge=1)]
Factor = Annotated[float, Field(ge=0)]
Scale = Annotated[float, Field(gt=0, le=8)]

SMALLEST_SCALE = 0.1

# Splits of the data sets as they ship, and as the reference uses them.
SPLITS = {"coco": ("train2017", "val2017"), "crowdpose": ("trainval", "test")}


class DataConfig(Settings):
    """Which pictures of people, and what training does to them."""

    name: Literal["figures", "coco", "crowdpose"] = Field(
        default="figures", description="figures: made up, drawn when read, 17 joints; coco: 17 joints; crowdpose: 14"
    )
    root: Path = Field(
        default=Path("data"), description="folder with annotations/ (coco) or json/ (crowdpose), and images/ or zips"
    )
    train: str | None = Field(
        default=None, description="split to train on, such as train2017 or train+val; null: the data set's own"
    )
    eval: str | None = Field(default=None, description="split to evaluate on; null: the data set's own")
    num_train: Count | None = Field(
        default=None, description="use the first N training pictures; null: all (figures: 2,048)"
    )
    num_eval: Count | None = Field(
        default=None, description="use the first N held-out pictures; null: all (figures: 128)"
    )
    size_px: int = Field(default=512, ge=64, description="side of the square that training pictures are warped to")
    sigma: float = Field(default=2.0, gt=0, le=16, description="spread of a joint's peak, pixels of the heat map")
    scale_aware: bool = Field(
        default=False, description="let the spread grow with the person, sigma for one of 256 pixels"
    )
    max_people: int = Field(default=30, ge=1, le=200, description="most people of a picture whose tags are trained")
    max_rotation_deg: float = Field(default=30.0, ge=0, le=180, description="turn at random by up to this, both ways")
    min_scale: Scale = Field(default=0.75, description="smallest random scale; smaller shows people larger")
    max_scale: Scale = Field(default=1.5, description="largest random scale")
    scale_side: Literal["short", "long"] = Field(
        default="short", description="side of the picture that fills the square at scale 1"
    )
    max_shift_px: float = Field(
        default=40.0, ge=0, description="move at random by up to this, for a side of 200 pixels at scale 1"
    )
    flip: float = Field(default=0.5, ge=0, le=1, description="share of pictures that are mirrored")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> DataConfig:
        if self.size_px % 32:
            raise ValueError(f"size_px ({self.size_px}) must be a multiple of 32, by which the network divides")
        if self.min_scale > self.max_scale:
            raise ValueError(f"min_scale ({self.min_scale}) is more than max_scale ({self.max_scale})")
        if self.name == "figures" and (self.train is not None or self.eval is not None):
            raise ValueError("train and eval name splits of coco or crowdpose; figures have none")
        return self

    @property
    def skeleton(self) -> Skeleton:
        """Whose joints."""
        return SKELETONS["crowdpose" if self.name == "crowdpose" else "coco"]


class ModelConfig(Settings):
    """The network: HigherHRNet."""

    width: int = Field(default=32, ge=1, description="channels at 1/4; each coarser branch has twice as many")
    num_modules: tuple[Count, Count, Count] = Field(
        default=(1, 4, 3), description="modules of the stages with two, three and four branches"
    )
    num_blocks: Count = Field(default=4, description="residual blocks of each branch of a module")
    stem_width: Count = Field(default=64, description="channels of the stem")
    stem_blocks: Count = Field(default=4, description="residual blocks of the stem")
    deconv_width: Count | None = Field(default=None, description="channels at 1/2; null: the same as width")
    deconv_blocks: int = Field(default=4, ge=0, description="residual blocks at 1/2")
    tag_per_joint: bool = Field(default=True, description="a map of tags for each joint; false: one for all")
    weights: Path | None = Field(
        default=None, description="checkpoint to start from: a HigherHRNet, or an HRNet trained on ImageNet"
    )


class LossConfig(Settings):
    """What counts how much. Tags are at 1/4 only."""

    heatmap: tuple[Factor, Factor] = Field(
        default=(1.0, 1.0), description="factors of the heat maps' squared error at 1/4 and 1/2"
    )
    push: Factor = Field(default=0.001, description="factor of the loss that drives people's tags apart")
    pull: Factor = Field(default=0.001, description="factor of the loss that draws a person's tags together")
    push_form: Literal["exp", "max"] = Field(
        default="exp", description="push of a pair whose tags are d apart: exp(-d^2), or max(0, 1 - d)"
    )


class TestConfig(Settings):
    """How people are found in a picture."""

    size_px: int | None = Field(default=None, ge=64, description="short side at scale 1; null: data.size_px")
    flip: bool = Field(default=True, description="look at the mirrored picture too")
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = Field(
        default=(1.0,), description="sizes at which a picture is looked at; tags come from 1"
    )
    project: bool = Field(default=True, description="bring all maps to the picture's size (PROJECT2IMAGE)")
    adjust: bool = Field(default=True, description="move joints a quarter pixel towards the higher neighbour")
    refine: bool = Field(default=True, description="look for a person's missing joints once more")
    detection_threshold: float = Field(default=0.1, ge=0, description="least height of a peak")
    tag_threshold: float = Field(default=1.0, gt=0, description="largest distance of a joint's tag from its person's")
    use_detection_value: bool = Field(default=True, description="let higher peaks choose their person first")
    ignore_too_much: bool = Field(default=False, description="leave joints out once there are max_people people")
    nms_kernel: int = Field(default=5, ge=1, description="a peak is the largest of a window of so many pixels; odd")
    max_people: int = Field(default=30, ge=1, le=200, description="peaks of each joint that are looked at")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> TestConfig:
        if self.nms_kernel % 2 == 0:
            raise ValueError(f"nms_kernel ({self.nms_kernel}) must be odd")
        if len(set(self.scales)) != len(self.scales):
            raise ValueError("scales: each once")
        if min(self.scales) < SMALLEST_SCALE:
            raise ValueError(f"scales: {SMALLEST_SCALE} at least, as pictures at scale 1 grow with 1 / the smallest")
        if len(self.scales) > 1 and 1 not in self.scales:
            raise ValueError("scales: tags come from scale 1, so it must be among them")
        # At the smallest scale the sides are multiples of 64, and the network divides by 32.
        if any(2 * scale / min(self.scales) % 1 for scale in self.scales):
            raise ValueError("scales: each must be a multiple of half the smallest")
        return self


class Config(RunConfig):
    """All settings of a run of the pose recipe."""

    data: DataConfig = Field(default=DataConfig(), description="which pictures of people")
    model: ModelConfig = Field(default=ModelConfig(), description="the network")
    loss: LossConfig = Field(default=LossConfig(), description="what counts how much")
    test: TestConfig = Field(default=TestConfig(), description="how people are found")

    def check_inputs(self) -> None:
        """Check that the dataset's folder exists; synthetic figures have none."""
        if self.data.name != "figures":
            check_exists("data.root", self.data.root)

    @property
    def skeleton(self) -> Skeleton:
        """Whose joints."""
        return self.data.skeleton


class MakeConfig(Settings):
    """What `lockstep data make pose` makes."""

    num_train: Count = Field(default=64, description="training pictures")
    num_eval: Count = Field(default=16, description="held-out pictures")
    size_px: int = Field(default=192, ge=64, le=2048, description="side of a picture")
    seed: int = Field(default=0, ge=0, description="other seeds, other pictures")
