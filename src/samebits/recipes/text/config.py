"""Settings of the text recipe, in addition to the shared settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from samebits.config.given import check_exists
from samebits.config.schema import RunConfig, Settings
from samebits.errors import DataError
from samebits.metrics.eval_sets import check_set_names
from samebits.recipes.network_config import TIMM, NetworkConfig

Width = Annotated[int, Field(ge=16, le=4096)]
WholePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
Normalize = Literal["none", "nfc", "nfkc", "half_width"]

HEIGHT_PX = 32
# Widths of width groups at a height of 32 pixels. Each is 1.25 times the one before, so that no image between them is
# stretched or squeezed by more than an eighth.
AUTO_WIDTHS = (64, 80, 100, 128, 160, 200, 252, 316, 396, 496, 620, 776)


class DataConfig(Settings):
    """The text lines: root, or train with eval or val_fraction."""

    root: Path | None = Field(
        default=None,
        description="Folder that data.train and data.eval are relative to: train.txt and test.txt if unset.",
    )
    train: str | None = Field(
        default=None, description="Label file or LMDB folder of the training lines."
    )
    eval: str | None = Field(
        default=None, description="Label file or LMDB folder of the validation lines."
    )
    eval_sets: dict[str, str] = Field(
        default={},
        description="Further validation sets by name, as data.eval: {night: FILE} adds night.line_accuracy.",
    )
    val_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of the lines of data.train used for validation, evenly spaced, instead of data.eval.",
    )
    images: WholePath | None = Field(
        default=None,
        description="Folder of the images. null: next to the labels, in images/ there, or in data.root.",
    )
    form: Literal["auto", "tsv", "words", "index"] = Field(
        default="auto",
        description="Format of a label line. tsv: path<TAB>text; words: path text; index: path and line numbers of "
        "data.chars; auto: detect.",
    )
    chars: WholePath | None = Field(
        default=None,
        description="File with one character per line, for index labels. null: char_std_5990.txt in data.root.",
    )
    alphabet: WholePath | None = Field(
        default=None,
        description="File with the characters, in the order of the classes. null: those in the labels.",
    )
    normalize: Normalize = Field(
        default="none",
        description="Unicode normalization of labels. half_width: only ！ to ～ and the ideographic space.",
    )
    on_unknown: Literal["error", "skip"] = Field(
        default="error",
        description="Lines with characters that are not in the alphabet: stop, or leave them out.",
    )
    on_too_long: Literal["error", "skip"] = Field(
        default="error",
        description="Lines with more characters than the network has time steps: stop, or leave them out.",
    )
    width: Width | Literal["auto"] | tuple[Width, ...] = Field(
        default=160,
        description="Width in pixels to which images are stretched; the height is 32. A list, or auto (12 widths): the "
        "nearest for each image.",
    )
    mean: float = Field(
        default=0.588, description="Mean of all pixels for normalization; white is 1."
    )
    std: float = Field(
        default=0.193, gt=0, description="Standard deviation of all pixels for normalization."
    )
    jitter: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Strength of random shift, tilt, brightness and blur of training images. 0: none.",
    )

    @field_validator("train", "eval")
    @classmethod
    def _is_found_from_anywhere(cls, value: str | None, info: ValidationInfo) -> str | None:
        # With a root it stays relative: each machine may have the data elsewhere.
        if value is None or info.data.get("root") is not None:
            return value
        return str(Path(value).expanduser().absolute())

    @model_validator(mode="after")
    def _files_fit_together(self) -> "DataConfig":
        if self.val_fraction is not None and self.eval is not None:
            raise ValueError(
                "eval and val_fraction cannot be combined: both define the validation lines. Set one of them"
            )
        is_split = self.eval is not None or self.val_fraction is not None
        if self.root is not None:
            return self
        if self.train is None and (is_split or self.eval_sets):
            raise ValueError("eval, eval_sets and val_fraction require train or root")
        if self.train is not None and not is_split:
            raise ValueError(
                "train requires eval, or val_fraction=0.2 to validate on a fifth of its lines"
            )
        return self

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths to which images are stretched, ascending, in pixels."""
        if self.width == "auto":
            return AUTO_WIDTHS
        return (self.width,) if isinstance(self.width, int) else tuple(sorted(set(self.width)))


class ModelConfig(NetworkConfig):
    """The network."""

    KNOWN = ("crnn", "fast")

    name: str = Field(
        default="crnn",
        description="Network. crnn: Shi et al. 2015, loads official checkpoints; fast: a smaller one for CPUs; or "
        f"{TIMM}, and averaged over the height.",
    )
    width: int = Field(
        default=64,
        ge=1,
        description="Channels of the first convolution, 64 in the CRNN paper; or of the merged feature map.",
    )
    num_hidden: int = Field(
        default=256, ge=1, description="Hidden size of each LSTM, per direction."
    )
    weights: Literal["pretrained"] | WholePath | None = Field(
        default=None,
        description="Pretrained weights: an official checkpoint, or the weights of a run; or pretrained: those that "
        "timm publishes for its network.",
    )
    freeze: Literal["backbone"] | tuple[str, ...] = Field(
        default=(),
        description="Parameters that are not trained: backbone (a network of timm), or names and patterns: cnn, "
        "cnn.conv0, *.bias.",
    )

    def num_steps(self, width_px: int) -> int:
        """Return T, the number of time steps for an image of a width."""
        return width_px // 4 + 1 if self.name == "crnn" else width_px // 4


class DecodeConfig(Settings):
    """Decoding of the network's output to text."""

    turns: bool = Field(
        default=True,
        description="In predict, also read the image upside down and return the more confident text.",
    )


class Config(RunConfig):
    """All settings of a run of the text recipe."""

    data: DataConfig = Field(default=DataConfig(), description="Text lines.")
    model: ModelConfig = Field(default=ModelConfig(), description="Network.")
    decode: DecodeConfig = Field(
        default=DecodeConfig(), description="Decoding of the network's output to text."
    )

    def check_inputs(self) -> None:
        """Check that data is set, and that its files and folders exist."""
        data = self.data
        if data.root is None and data.train is None:
            raise DataError(
                "no dataset is set: data.root and data.train are null",
                fix="Set data.root=DIR, a folder with train.txt and test.txt,\n"
                "or set data.train and data.eval to label files or LMDB folders.",
            )
        check_exists("data.root", data.root)
        if data.root is None:  # otherwise these are relative to root
            check_exists("data.train", data.train)
            check_exists("data.eval", data.eval)
            for name, path in data.eval_sets.items():
                check_exists(f"data.eval_sets.{name}", path)
        check_set_names(data.eval_sets, "data.eval_sets")
        for name in ("images", "chars", "alphabet"):
            check_exists(f"data.{name}", getattr(data, name))
