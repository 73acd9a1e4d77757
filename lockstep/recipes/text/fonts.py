"""Fonts that synthetic lines are drawn with: those of the machine that have the characters, and the lines' ink."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lockstep.config.plain_file import read_plain
from lockstep.errors import DataError
from lockstep.recipes.text.alphabet import show_character
from lockstep.report.fonts import covered, family_of, font_files, font_places

_MAX_FONT_BYTES = 1 << 28


@dataclass(frozen=True)
class Font:
    """A font file.

    Attributes:
        path: The file.
        family: Such as "DejaVu Sans": fonts of one family look alike.
        sha256: Of the file, the first 16 digits: another version draws other lines.
    """

    path: str
    family: str
    sha256: str


def find_fonts(folder: Path | None, characters: str) -> list[Font]:
    """The fonts that can draw at least half of some characters, by family and file name.

    Args:
        folder: Is searched with all that is in it; None: where systems keep fonts.
        characters: What is to be drawn.

    Raises:
        DataError: There is none, or a character that none of them can draw.
    """
    places = font_places() if folder is None else [folder]
    files = font_files(places)
    fonts = []
    drawn: set[str] = set()
    for file in files:
        family = family_of(file)
        can = covered(str(file), characters) if family is not None else ""
        if family is not None and 2 * len(can) >= len(characters):
            try:
                fonts.append(Font(str(file), family, _sha256(file)))
            except OSError as error:
                raise DataError(
                    f"the font {file} cannot be read: {error.strerror or error}", fix="take it out"
                ) from error
            drawn |= set(can)
    where = ", ".join(map(str, places))
    if not fonts:
        raise DataError(
            f"no font can draw half of the {len(characters):,} characters, and synthetic lines need one",
            given=f"{len(files):,} font files in {where}",
            fix="install fonts (Debian: apt install fonts-dejavu fonts-liberation), or name a folder with .ttf files",
        )
    lacking = [character for character in characters if character not in drawn]
    if lacking:
        raise DataError(
            f"no font draws {show_character(lacking[0])}"
            + (f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""),
            given=f"{len(fonts):,} fonts in {where}",
            fix="add a font that has them, or take them out of the alphabet",
        )
    return sorted(fonts, key=lambda font: (font.family, Path(font.path).name, font.path))


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_plain(file, _MAX_FONT_BYTES)).hexdigest()[:16]


def split_fonts(fonts: Sequence[Font], share: float) -> tuple[list[Font], list[Font]]:
    """Fonts for training, and fonts of other families that training never sees.

    Evenly spread over the families in alphabetical order; at least one family stays on each side. With a share above
    0 and a single family, single fonts are held out in place of families.

    Returns:
        Seen, unseen.
    """
    families = sorted({font.family for font in fonts})
    names = families if len(families) > 1 else [font.path for font in fonts]
    if share == 0 or len(names) < 2:
        return list(fonts), []
    count = min(max(1, round(share * len(names))), len(names) - 1)
    out = {names[int((place + 0.5) * len(names) / count)] for place in range(count)}
    is_out = [(font.family if len(families) > 1 else font.path) in out for font in fonts]
    seen = [font for font, out in zip(fonts, is_out, strict=True) if not out]
    return seen, [font for font, out in zip(fonts, is_out, strict=True) if out]


def check_fonts(fonts: Iterable[Font]) -> None:
    """See that fonts are what they were when a run started.

    Raises:
        DataError: One is gone or another.
    """
    for font in fonts:
        try:
            now = _sha256(Path(font.path))
        except OSError as error:
            raise DataError(
                f"the font {font.path} cannot be read: {error.strerror or error}",
                cause="this run began on a machine that has other fonts",
                fix="install it here too, or start a new run",
            ) from error
        if now != font.sha256:
            raise DataError(f"the font {font.path} is another one than when this run started", fix="Start a new run")


def draw_text(
    font: ImageFont.FreeTypeFont, text: str, spacing_px: float
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], int]:
    """Draw characters side by side, on one base line: (H, W) bytes, 255 for full ink.

    H is the font's own height of a line, so that a small o stays smaller than a large one.

    Returns:
        The image, and the width of its margin on each side.
    """
    ascent, descent = font.getmetrics()
    margin = max(2, (ascent + descent) // 4)
    steps = [font.getlength(character) + spacing_px for character in text]
    width = 2 * margin + max(1, round(sum(steps) - spacing_px))
    image = Image.new("L", (width, ascent + descent), 0)
    draw = ImageDraw.Draw(image)
    x = float(margin)
    for character, step in zip(text, steps, strict=True):
        draw.text((x, 0), character, 255, font)
        x += step
    return np.asarray(image), margin
