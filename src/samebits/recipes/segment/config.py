"""Settings of the segment recipe, in addition to the shared settings."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from samebits.config.given import check_exists
from samebits.config.schema import RunConfig, Settings
from samebits.errors import DataError
from samebits.recipes.network_config import TIMM, NetworkConfig
from samebits.recipes.vision_config import CROP_AREA, Count, Share, VisionData

Side = Annotated[int, Field(ge=32, le=4096)]
Value = Annotated[int, Field(ge=0, le=65535)]

MODELS = (
    "unet", "deeplabv3_resnet50", "deeplabv3_resnet101", "deeplabv3_mobilenet_v3_large", "fcn_resnet50",
    "fcn_resnet101", "lraspp_mobilenet_v3_large",
)  # fmt: skip
MAX_CLASSES = 255  # labels are bytes, and the last one is for pixels that are ignored
MAX_PIXELS = 1 << 26  # logits are interpolated to this size: some 9 bytes for each pixel


class DataConfig(VisionData):
    """The dataset and the augmentation."""

    name: Literal["files", "shapes"] = Field(
        default="files",
        description="Dataset. files: your images and masks; shapes: synthetic ones, drawn when loaded.",
    )
    root: Path | None = Field(
        default=None,
        description="Folder with images/ and masks/, or a COCO annotation file. Without data.eval, data.val_fraction "
        "of its images is the validation split.",
    )
    image_folder: str = Field(
        default="images", description="Name of the folder of the images in data.root."
    )
    mask_folder: str = Field(
        default="masks", description="Name of the folder of the masks in data.root."
    )
    mask_suffix: str = Field(
        default="",
        description="End of a mask's name after the name of its image, such as _mask in a_mask.png.",
    )
    images: Path | None = Field(
        default=None,
        description="Folder of the images of COCO files. null: the folder of each file.",
    )
    classes: tuple[str, ...] | None = Field(
        default=None,
        description="Names of the classes, in the order of the model's outputs. null: one for each value in the masks; "
        "of COCO files, background and all categories.",
    )
    values: tuple[Value, ...] | None = Field(
        default=None,
        description="Pixel values of the classes in the masks, in the order of data.classes. null: read all masks "
        "before training, and use the values that occur.",
    )
    ignore_label: Value | None = Field(
        default=255,
        description="Pixel value in the masks that neither loss nor metrics count. null: none.",
    )
    num_train: Count = Field(default=512, description="Training images of data.name=shapes.")
    num_eval: Count = Field(default=64, description="Validation images of data.name=shapes.")
    size_px: tuple[Side, Side] = Field(
        default=(256, 256),
        description="Height and width to which images are resized, in pixels: multiples of 32. One number: both.",
    )
    crop_area: tuple[Share, Share] = Field(default=(0.25, 1.0), description=CROP_AREA)

    @field_validator("size_px", mode="before")
    @classmethod
    def _as_pair(cls, size: Any) -> Any:
        if isinstance(size, list):
            return tuple(size)
        return (size, size) if isinstance(size, int) and not isinstance(size, bool) else size

    @model_validator(mode="after")
    def _settings_fit_together(self) -> "DataConfig":
        if self.name == "shapes" and (self.root or self.train or self.eval):
            raise ValueError(
                "name=shapes draws its images. For root, train and eval set name=files"
            )
        if any(side % 32 for side in self.size_px):
            raise ValueError(
                f"size_px {list(self.size_px)} must be multiples of 32, the stride of the networks"
            )
        for name in ("classes", "values"):
            given = getattr(self, name)
            if given is not None and not (
                len(set(given)) == len(given) and 2 <= len(given) <= MAX_CLASSES
            ):
                raise ValueError(f"{name} must be 2 to {MAX_CLASSES} different ones")
        if (
            self.values is not None
            and self.classes is not None
            and len(self.values) != len(self.classes)
        ):
            raise ValueError(
                f"values has {len(self.values)} entries, but classes has {len(self.classes)}"
            )
        for folder in (self.image_folder, self.mask_folder):
            if Path(folder).is_absolute() or ".." in Path(folder).parts:
                raise ValueError(f"{folder} must be the name of a folder in data.root")
        return self


class ModelConfig(NetworkConfig):
    """The network and its initial weights."""

    KNOWN = MODELS

    name: str = Field(default="unet", description=f"Network: {', '.join(MODELS)}; or {TIMM}.")
    width: int = Field(
        default=32,
        ge=1,
        le=512,
        description="Channels of the first level of unet, each coarser one has twice as many; or of the "
        "merged feature map.",
    )
    weights: Literal["pretrained"] | Path | None = Field(
        default=None,
        description="Pretrained weights: .pth, .pt, .pth.tar or .safetensors, whose last layer may have another "
        "size; or pretrained: those that timm publishes for its network.",
    )


class LossConfig(Settings):
    """The loss: cross-entropy, and optionally the Dice loss."""

    dice: float = Field(
        default=0.0, ge=0, description="Weight of the Dice loss, which helps small classes."
    )


class Config(RunConfig):
    """All settings of a run of the segment recipe."""

    data: DataConfig = Field(default=DataConfig(), description="Dataset and augmentation.")
    model: ModelConfig = Field(default=ModelConfig(), description="Network and initial weights.")
    loss: LossConfig = Field(default=LossConfig(), description="Loss.")

    def check_inputs(self) -> None:
        """Check that data is set, and that its files and folders exist."""
        data = self.data
        if data.name == "files" and data.path(train=True) is None:
            raise DataError(
                "no dataset is set: data.root and data.train are null",
                fix="Set data.root=DIR, a folder with images/ and masks/, or a COCO annotation file.\n"
                "To try without a dataset, run: samebits train segment_shapes",
            )
        for name in ("root", "train", "eval", "images"):
            check_exists(f"data.{name}", getattr(data, name))


class MakeConfig(Settings):
    """A synthetic dataset."""

    num_images: int = Field(default=100, ge=2, description="Number of images.")
    size_px: int = Field(default=96, ge=32, le=2048, description="Side of an image, in pixels.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the random images.")
