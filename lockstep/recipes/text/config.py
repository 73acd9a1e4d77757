"""The settings of the text recipe, beside those that all recipes share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lockstep.config.given import check_exists
from lockstep.config.schema import RunConfig, Settings

Count = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=16, le=4096)]
Normalise = Literal["none", "nfc", "nfkc", "half_width"]

HEIGHT_PX = 32
# Digits and Latin letters but for I, l and O: in many fonts they can't be told from l, 1 and 0 in a line without sense.
LATIN = "0123456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
# Widths of pictures 32 pixels high that are read alike: each 1.25 times the one before, so that none is stretched or
# squeezed by more than an eighth in between.
AUTO_WIDTHS = (64, 80, 100, 128, 160, 200, 252, 316, 396, 496, 620, 776)


class StyleConfig(Settings):
    """How made-up lines look; each line draws its own values from these ranges."""

    slant: float = Field(default=0.2, ge=0, le=1, description="largest shear: pixels to a side for each pixel up")
    turn_degrees: float = Field(default=2.0, ge=0, le=20, description="largest turn")
    spacing: float = Field(default=0.15, ge=0, le=2, description="most space between characters, in heights of a line")
    blur_px: float = Field(default=0.8, ge=0, le=5, description="largest standard deviation of the blur")
    noise: float = Field(default=0.08, ge=0, le=1, description="largest standard deviation of the noise; white is 1")
    inverted: float = Field(default=0.3, ge=0, le=1, description="share of lines that are light on dark")
    backgrounds: bool = Field(default=True, description="uneven grounds: slopes of light, blotches, strokes")


class MadeConfig(Settings):
    """Made-up lines, drawn when they are asked for."""

    fonts: Path | None = Field(
        default=None, description="folder with .ttf, .otf and .ttc files; null: those that this machine has"
    )
    num_train: Count = Field(default=100_000, description="lines of an epoch; each epoch has lines of its own")
    num_eval: Count = Field(default=2_000, description="held-out lines; half in fonts of training, half in others")
    unseen: float = Field(
        default=0.2, ge=0, le=0.9, description="share of font families that training never sees; 0: no such fonts"
    )
    min_length: Count = Field(default=3, description="fewest characters of a line")
    max_length: Count = Field(default=8, description="most characters of a line")
    style: StyleConfig = Field(default=StyleConfig(), description="how lines look")

    @model_validator(mode="after")
    def _lengths_fit_together(self) -> MadeConfig:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length ({self.min_length}) is more than max_length ({self.max_length})")
        return self


class DataConfig(Settings):
    """Which lines of text. Without root, train and eval: made-up ones."""

    root: Path | None = Field(
        default=None, description="folder that train and eval are looked for in: train.txt and test.txt if left out"
    )
    train: str | None = Field(default=None, description="file with labels, or LMDB folder, to train with")
    eval: str | None = Field(default=None, description="the same, held out")
    held_out: float | None = Field(
        default=None, gt=0, lt=1, description="share of train's lines that is held out, evenly spread, in place of eval"
    )
    images: Path | None = Field(
        default=None, description="folder with the pictures; null: beside the labels, or in images or root"
    )
    form: Literal["auto", "tsv", "words", "index"] = Field(
        default="auto",
        description="of a line of labels: path<TAB>text; path text; path and lines of data.chars by number",
    )
    chars: Path | None = Field(
        default=None, description="what index labels mean, one character a line; null: char_std_5990.txt in root"
    )
    encoding: Literal["auto", "utf-8", "gbk"] = Field(
        default="auto", description="of label files; auto: UTF-8, or GBK where it is not that"
    )
    alphabet: Path | None = Field(
        default=None, description="file with the characters, in the order of the classes; null: those in the labels"
    )
    normalise: Normalise = Field(
        default="none",
        description="Unicode form that labels are brought to; half_width: only ！ to ～ and the wide space",
    )
    on_unknown: Literal["error", "skip"] = Field(
        default="error", description="lines with characters that the alphabet lacks"
    )
    on_too_long: Literal["error", "skip"] = Field(
        default="error", description="lines with more characters than the network has time steps for"
    )
    width: Width | Literal["auto"] | tuple[Width, ...] = Field(
        default=160,
        description="pixels to which pictures, 32 high, are stretched; several, or auto: each to the nearest",
    )
    mean: float = Field(default=0.588, description="of all pixels, with white as 1")
    std: float = Field(default=0.193, gt=0, description="the same pixels' standard deviation")
    jitter: float = Field(
        default=0.0, ge=0, le=1, description="how far training pictures are moved, tilted, lit and blurred at random"
    )
    made: MadeConfig = Field(default=MadeConfig(), description="made-up lines")

    @field_validator("train", "eval")
    @classmethod
    def _is_found_from_anywhere(cls, value: str | None, info: ValidationInfo) -> str | None:
        # With a root it stays relative: each machine may have the data elsewhere.
        if value is None or info.data.get("root") is not None:
            return value
        return str(Path(value).expanduser().absolute())

    @field_validator("images", "chars", "alphabet")
    @classmethod
    def _is_a_whole_path(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @model_validator(mode="after")
    def _files_fit_together(self) -> DataConfig:
        if self.held_out is not None and self.eval is not None:
            raise ValueError("eval and held_out can't both be given: one says what is held out")
        if self.root is None and self.train is None and (self.eval is not None or self.held_out is not None):
            raise ValueError("eval and held_out need train")
        if self.root is None and self.train is not None and self.eval is None and self.held_out is None:
            raise ValueError("train needs eval, or held_out=0.2 to hold out a share of it")
        if self.is_made and not isinstance(self.width, int):
            raise ValueError("made-up lines need one width, such as 160; groups of widths are for pictures in files")
        return self

    @property
    def is_made(self) -> bool:
        """Whether lines are made up."""
        return self.root is None and self.train is None

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that pictures are brought to, rising."""
        if self.width == "auto":
            return AUTO_WIDTHS
        return (self.width,) if isinstance(self.width, int) else tuple(sorted(set(self.width)))


class ModelConfig(Settings):
    """Which network."""

    name: Literal["crnn", "fast"] = Field(
        default="crnn", description="crnn: Shi et al. 2015, the names of official checkpoints; fast: one for CPUs"
    )
    width: int = Field(default=64, ge=1, description="channels of the first convolution; 64 in crnn's paper")
    num_hidden: int = Field(default=256, ge=1, description="of each LSTM, in each direction")
    weights: Path | None = Field(default=None, description="file to start from: an official checkpoint, or a run's")
    freeze: tuple[str, ...] = Field(default=(), description="parts that stay as they are: cnn, cnn.conv0, *.bias")

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    @field_validator("weights")
    @classmethod
    def _is_a_whole_path(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    def num_steps(self, width_px: int) -> int:
        """Time steps that a picture of a width gives: T."""
        return width_px // 4 + 1 if self.name == "crnn" else width_px // 4


class DecodeConfig(Settings):
    """From the network's answer to text."""

    beam_width: Count = Field(default=1, description="texts that are followed at a time; 1: the likeliest path only")
    turns: bool = Field(
        default=True, description="predict also looks at a picture turned round, and gives the surer answer"
    )


class Config(RunConfig):
    """All settings of a run of the text recipe."""

    data: DataConfig = Field(default=DataConfig(), description="which lines of text")
    model: ModelConfig = Field(default=ModelConfig(), description="which network")
    decode: DecodeConfig = Field(default=DecodeConfig(), description="from the network's answer to text")

    def check_inputs(self) -> None:
        """Check that the data's files and folders exist."""
        data = self.data
        check_exists("data.root", data.root)
        if data.root is None:  # otherwise these are relative to root
            check_exists("data.train", None if data.train is None else Path(data.train))
            check_exists("data.eval", None if data.eval is None else Path(data.eval))
        for name in ("images", "chars", "alphabet"):
            check_exists(f"data.{name}", getattr(data, name))

    @model_validator(mode="after")
    def _lines_fit(self) -> Config:
        if self.data.is_made:
            num_steps = self.model.num_steps(self.data.widths[0])
            most = (num_steps + 1) // 2
            if self.data.made.max_length > most:
                raise ValueError(
                    f"data.made.max_length {self.data.made.max_length} is too long for data.width {self.data.width}: "
                    f"its {num_steps} time steps hold {most} equal characters"
                )
        return self


class MakeConfig(Settings):
    """What `lockstep data make text` makes."""

    num: Count = Field(default=10_000, description="lines to train with")
    num_eval: int = Field(default=0, ge=0, description="lines beside them in fonts of their own, as val.tsv")
    alphabet: Path | None = Field(default=None, description="file with the characters; null: digits and Latin letters")
    fonts: Path | None = Field(
        default=None, description="folder with .ttf, .otf and .ttc files; null: those that this machine has"
    )
    min_length: Count = Field(default=3, description="fewest characters of a line")
    max_length: Count = Field(default=10, description="most characters of a line")
    height_px: int = Field(
        default=HEIGHT_PX, ge=8, le=512, description="height of the pictures; they are as wide as they need"
    )
    unseen: float = Field(default=0.2, gt=0, le=0.9, description="share of font families for the lines beside them")
    seed: int = Field(default=0, ge=0, description="chooses the lines")
    style: StyleConfig = Field(default=StyleConfig(), description="how lines look")

    @model_validator(mode="after")
    def _lengths_fit_together(self) -> MakeConfig:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length ({self.min_length}) is more than max_length ({self.max_length})")
        return self
