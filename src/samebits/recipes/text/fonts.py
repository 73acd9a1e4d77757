"""Find the fonts of synthetic lines, and draw text with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from samebits.config.plain_file import read_plain
from samebits.errors import DataError
from samebits.recipes.text.alphabet import show_character
from samebits.report.fonts import covered, family_of, font_files, font_places

_MAX_FONT_BYTES = 1 << 28


@dataclass(frozen=True)
class Font:
    """A font file.

    Attributes:
        path: The path of the file.
        family: Name of the family, such as "DejaVu Sans". Fonts of one family look alike.
        sha256: First 16 digits of the SHA-256 of the file, because another version draws other lines.
    """

    path: str
    family: str
    sha256: str


def find_fonts(folder: Path | None, characters: str) -> list[Font]:
    """Find the fonts that have at least half of the characters, sorted by family and file name.

    Args:
        folder: Folder to search, recursively. None: the font folders of the system.
        characters: The characters to draw.

    Raises:
        DataError: There is no such font, or no font has one of the characters.
    """
    folders = font_places() if folder is None else [folder]
    files = font_files(folders)
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
                    f"the font {file} can't be read: {error.strerror or error}", fix="Delete it, or make it readable."
                ) from error
            drawn |= set(can)
    where = ", ".join(map(str, folders))
    if not fonts:
        raise DataError(
            f"no font has half of the {len(characters):,} characters, and synthetic lines need one",
            given=f"{len(files):,} font files in {where}",
            fix="Install fonts (Debian: apt install fonts-dejavu fonts-liberation), or set a folder with .ttf files.",
        )
    lacking = [character for character in characters if character not in drawn]
    if lacking:
        raise DataError(
            f"no font has {show_character(lacking[0])}"
            + (f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""),
            given=f"{len(fonts):,} fonts in {where}",
            fix="Add a font that has them, or remove them from the alphabet.",
        )
    return sorted(fonts, key=lambda font: (font.family, Path(font.path).name, font.path))


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_plain(file, _MAX_FONT_BYTES)).hexdigest()[:16]


def split_fonts(fonts: Sequence[Font], share: float) -> tuple[list[Font], list[Font]]:
    """Split fonts by family into fonts for training and fonts for validation only.

    The unseen families are evenly spaced in alphabetical order. Each side has at least one family. If there is only
    one family, the split is by font.

    Args:
        fonts: All fonts.
        share: Fraction of the families that are unseen. 0: none.

    Returns:
        Seen fonts and unseen fonts.
    """
    families = sorted({font.family for font in fonts})
    names = families if len(families) > 1 else [font.path for font in fonts]
    if share == 0 or len(names) < 2:
        return list(fonts), []
    count = min(max(1, round(share * len(names))), len(names) - 1)
    chosen = {names[int((index + 0.5) * len(names) / count)] for index in range(count)}
    is_unseen = [(font.family if len(families) > 1 else font.path) in chosen for font in fonts]
    seen = [font for font, unseen in zip(fonts, is_unseen, strict=True) if not unseen]
    return seen, [font for font, unseen in zip(fonts, is_unseen, strict=True) if unseen]


def check_fonts(fonts: Iterable[Font]) -> None:
    """Check that fonts are the same files as at the start of the run.

    Raises:
        DataError: A font is missing or has changed.
    """
    for font in fonts:
        try:
            now = _sha256(Path(font.path))
        except OSError as error:
            raise DataError(
                f"the font {font.path} can't be read: {error.strerror or error}",
                cause="the run was started on a machine with other fonts",
                fix="Install the font on this machine, or start a new run.",
            ) from error
        if now != font.sha256:
            raise DataError(
                f"the font {font.path} has changed since the start of the run",
                fix="Restore this version of the font, or start a new run.",
            )


def draw_text(
    font: ImageFont.FreeTypeFont, text: str, spacing_px: float
) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.uint8]], int]:
    """Draw characters next to each other on one base line.

    The height is the line height of the font, so that a lowercase o stays smaller than an uppercase O.

    Args:
        font: The font.
        text: The characters.
        spacing_px: Extra space between characters.

    Returns:
        (H, W) bytes, 255 for full ink; and the margin on the left and on the right, in pixels.
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
