"""Settings of the pose recipe, in addition to the shared settings.

Names in brackets are those of the reference implementation.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from samebits.config.given import check_exists
from samebits.config.schema import RunConfig, Settings
from samebits.metrics.eval_sets import check_set_names
from samebits.recipes.network_config import TIMM, NetworkConfig
from samebits.recipes.pose.skeletons import SKELETONS, Skeleton
from samebits.recipes.vision_config import Count

Factor = Annotated[float, Field(ge=0)]
Scale = Annotated[float, Field(gt=0, le=8)]

SMALLEST_SCALE = 0.1

# Splits of the datasets as they ship, and as the reference uses them.
SPLITS = {"coco": ("train2017", "val2017"), "crowdpose": ("trainval", "test")}


class DataConfig(Settings):
    """The dataset and the augmentation."""

    name: Literal["coco", "crowdpose"] = Field(
        default="coco", description="Dataset. coco: 17 joints; crowdpose: 14 joints."
    )
    root: Path = Field(
        default=Path("data"),
        description="Folder with annotations/ (coco) or json/ (crowdpose), and images/.",
    )
    train: str | None = Field(
        default=None,
        description="Training split, such as train2017 or train+val. null: the default of the dataset.",
    )
    eval: str | None = Field(
        default=None, description="Validation split. null: the default of the dataset."
    )
    eval_sets: dict[str, str] = Field(
        default={},
        description="Further validation splits by name, as data.eval: {small: SPLIT} adds small.AP.",
    )
    num_train: Count | None = Field(
        default=None, description="Use the first N training images. null: all."
    )
    num_eval: Count | None = Field(
        default=None, description="Use the first N validation images. null: all."
    )
    size_px: int = Field(
        default=512,
        ge=64,
        description="Side of the square training images, in pixels: a multiple of 32.",
    )
    sigma: float = Field(
        default=2.0,
        gt=0,
        le=16,
        description="Standard deviation of a joint's peak, in heatmap pixels.",
    )
    max_people: int = Field(
        default=30,
        ge=1,
        le=200,
        description="Maximum number of people per image whose tags are trained.",
    )
    max_rotation_deg: float = Field(
        default=30.0,
        ge=0,
        le=180,
        description="Maximum random rotation, in degrees, in both directions.",
    )
    min_scale: Scale = Field(
        default=0.75, description="Minimum random scale. A smaller scale shows people larger."
    )
    max_scale: Scale = Field(default=1.5, description="Maximum random scale.")
    scale_side: Literal["short", "long"] = Field(
        default="short", description="Side of the image that fills the square at scale 1."
    )
    max_shift_px: float = Field(
        default=40.0,
        ge=0,
        description="Maximum random shift, in pixels of an image whose side is 200 at scale 1.",
    )
    flip: float = Field(default=0.5, ge=0, le=1, description="Probability of a horizontal flip.")

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "DataConfig":
        if self.size_px % 32:
            raise ValueError(
                f"size_px ({self.size_px}) must be a multiple of 32, the stride of the network"
            )
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"min_scale ({self.min_scale}) must be at most max_scale ({self.max_scale})"
            )
        return self

    @property
    def skeleton(self) -> Skeleton:
        """The joints of the dataset."""
        return SKELETONS[self.name]


class ModelConfig(NetworkConfig):
    """The network: HigherHRNet, or heatmaps and tags on a network of timm."""

    KNOWN = ("higherhrnet",)

    name: str = Field(default="higherhrnet", description=f"Network: higherhrnet; or {TIMM}.")
    width: int = Field(
        default=32,
        ge=1,
        description="Channels of the branch at 1/4 resolution, each coarser one has twice as many; or of the merged "
        "feature map.",
    )
    num_modules: tuple[Count, Count, Count] = Field(
        default=(1, 4, 3), description="Modules of the stages with two, three and four branches."
    )
    num_blocks: Count = Field(default=4, description="Residual blocks per branch of a module.")
    stem_width: Count = Field(default=64, description="Channels of the stem.")
    stem_blocks: Count = Field(default=4, description="Residual blocks of the stem.")
    deconv_blocks: int = Field(default=4, ge=0, description="Residual blocks at 1/2 resolution.")
    weights: Literal["pretrained"] | Path | None = Field(
        default=None,
        description="Pretrained weights: a HigherHRNet, or an HRNet trained on ImageNet; or pretrained: those that "
        "timm publishes for its network.",
    )


class LossConfig(Settings):
    """Weights of the terms of the loss. Tags are trained at 1/4 resolution only."""

    heatmap: tuple[Factor, Factor] = Field(
        default=(1.0, 1.0), description="Weights of the heatmap losses at 1/4 and 1/2 resolution."
    )
    push: Factor = Field(
        default=0.001,
        description="Weight of the push loss, which separates the tags of different people.",
    )
    pull: Factor = Field(
        default=0.001, description="Weight of the pull loss, which groups the tags of one person."
    )
    push_form: Literal["exp", "max"] = Field(
        default="exp",
        description="Push loss of two people with tag distance d. exp: exp(-d^2); max: max(0, 1 - d).",
    )


class TestConfig(Settings):
    """Inference: from heatmaps and tags to people."""

    size_px: int | None = Field(
        default=None,
        ge=64,
        description="Shorter side of the image at scale 1, in pixels. null: data.size_px.",
    )
    flip: bool = Field(default=True, description="Average with the horizontally flipped image.")
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = Field(
        default=(1.0,), description="Scales of multi-scale testing. Tags are taken from scale 1."
    )
    project: bool = Field(
        default=True,
        description="Resize all maps to the network's input size (PROJECT2IMAGE). false: to half of it.",
    )
    adjust: bool = Field(
        default=True, description="Move joints a quarter pixel towards the higher neighbor."
    )
    refine: bool = Field(
        default=True, description="Search once more for the missing joints of each person."
    )
    detection_threshold: float = Field(
        default=0.1,
        ge=0,
        description="Minimum height of a peak. Increase it if there are many faint false people.",
    )
    tag_threshold: float = Field(
        default=1.0,
        gt=0,
        description="Maximum distance of a joint's tag from the mean tag of its person.",
    )
    nms_kernel: int = Field(
        default=5, ge=1, description="Window of non-maximum suppression, in pixels: an odd number."
    )
    max_people: int = Field(
        default=30, ge=1, le=200, description="Peaks per joint that are grouped."
    )

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "TestConfig":
        if self.nms_kernel % 2 == 0:
            raise ValueError(f"nms_kernel ({self.nms_kernel}) must be odd")
        if len(set(self.scales)) != len(self.scales):
            raise ValueError("scales has a duplicate")
        if min(self.scales) < SMALLEST_SCALE:
            raise ValueError(
                f"scales must be at least {SMALLEST_SCALE}: memory at scale 1 grows with 1 / the smallest scale"
            )
        if len(self.scales) > 1 and 1 not in self.scales:
            raise ValueError("scales must contain 1, because tags are taken from scale 1")
        # At the smallest scale the sides are multiples of 64, and the network divides by 32.
        if any(2 * scale / min(self.scales) % 1 for scale in self.scales):
            raise ValueError("scales must be multiples of half the smallest one")
        return self


class Config(RunConfig):
    """All settings of a run of the pose recipe."""

    data: DataConfig = Field(default=DataConfig(), description="Dataset and augmentation.")
    model: ModelConfig = Field(default=ModelConfig(), description="Network.")
    loss: LossConfig = Field(default=LossConfig(), description="Weights of the terms of the loss.")
    test: TestConfig = Field(
        default=TestConfig(), description="Inference: from heatmaps and tags to people."
    )

    def check_inputs(self) -> None:
        """Check that the dataset's folder exists."""
        check_exists("data.root", self.data.root)
        check_set_names(self.data.eval_sets, "data.eval_sets")

    @property
    def skeleton(self) -> Skeleton:
        """The joints of the dataset."""
        return self.data.skeleton
