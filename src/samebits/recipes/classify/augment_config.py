"""Settings of augmentation beyond random crops and flips."""

from typing import Annotated, Literal

from pydantic import Field

from samebits.config.sections import Settings

Share = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(Settings):
    """Augmentation of training images beyond random crops and flips, by torchvision.transforms.v2."""

    policy: Literal["randaugment", "trivialaugment_wide"] | None = Field(
        default=None, description="Random operations on each image: RandAugment or TrivialAugmentWide. null: none."
    )
    num_ops: int = Field(default=2, ge=1, le=14, description="Operations on each image (randaugment).")
    magnitude: int = Field(default=9, ge=0, le=30, description="Strength of the operations, 0 to 30 (randaugment).")
    brightness: float = Field(default=0.0, ge=0, description="Largest relative change of brightness (color jitter).")
    contrast: float = Field(default=0.0, ge=0, description="Largest relative change of contrast (color jitter).")
    saturation: float = Field(default=0.0, ge=0, description="Largest relative change of saturation (color jitter).")
    hue: float = Field(default=0.0, ge=0, le=0.5, description="Largest shift of the hue, in turns (color jitter).")
    erasing: Share = Field(default=0.0, description="Probability that a random rectangle of an image is erased.")
    erasing_fill: Literal["mean", "noise"] = Field(
        default="mean", description="Content of an erased rectangle: the mean color, or normal noise for each pixel."
    )
    mixup: float = Field(
        default=0.0, ge=0, description="Alpha of MixUp within a micro-batch, such as 0.2. 0: no MixUp."
    )
    cutmix: float = Field(
        default=0.0, ge=0, description="Alpha of CutMix within a micro-batch, such as 1.0. 0: no CutMix."
    )
    mix_probability: Share = Field(
        default=1.0,
        description="Probability that a micro-batch is mixed. With mixup and cutmix, each is used for half of these.",
    )

    @property
    def is_on(self) -> bool:
        """Whether any operation is selected."""
        jitter = self.brightness or self.contrast or self.saturation or self.hue
        is_mixing = (self.mixup or self.cutmix) and self.mix_probability
        return bool(self.policy or jitter or self.erasing or is_mixing)
