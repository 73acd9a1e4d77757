"""Settings of data that recipes share: where samples are, and random crops of their images. Loads no torch."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from samebits.config.schema import Settings

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
CROP_AREA = "Minimum and maximum area of a random training crop, as a fraction of the image."


class VisionData(Settings):
    """A training and a validation set of images, or one set that is split. Recipes name their forms at `root`."""

    root: Path | None = None
    train: Path | None = Field(
        default=None, description="Training images, instead of data.root, in one of its forms."
    )
    eval: Path | None = Field(
        default=None,
        description="Validation images, with data.root or data.train, in one of the forms of data.root.",
    )
    val_fraction: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="Fraction of data.root that is used for validation, without data.eval; of each class in classify.",
    )
    classes: tuple[str, ...] | None = None
    crop_area: tuple[Share, Share]
    crop_ratio: tuple[Positive, Positive] = Field(
        default=(0.75, 1.3333),
        description="Minimum and maximum width / height of a random training crop; in segment, relative to those of "
        "the image.",
    )
    flip: Share = Field(
        default=0.5, description="Probability of a horizontal flip of a training image."
    )

    def path(self, *, train: bool) -> Path | None:
        """Return the set that has the training or the validation images; None if no set is named."""
        return self.root or self.train if train or self.eval is None else self.eval

    def setting(self, *, train: bool) -> str:
        """Return the name of the setting that names this set."""
        own = "data.train" if train else "data.eval"
        return own if getattr(self, own.removeprefix("data.")) is not None else "data.root"

    @model_validator(mode="after")
    def _sets_and_crops_fit_together(self) -> Self:
        if self.root is not None and self.train is not None:
            raise ValueError(
                "root and train cannot be combined: both name the training images. Set one of them"
            )
        if self.train is not None and self.eval is None:
            raise ValueError("train requires eval: val_fraction applies to root only")
        if self.eval is not None and self.path(train=True) is None:
            raise ValueError("eval requires train or root, which name the training images")
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high or not high:
                raise ValueError(f"{name} must be the minimum, then the maximum, which is above 0")
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise ValueError("classes has a duplicate")
        return self
