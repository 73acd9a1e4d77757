"""Fonts of the machine: where they are, what each can draw, and one for a text in any script."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

from PIL import ImageFont

_ENDINGS = {".ttf", ".otf", ".ttc"}
_PLACES = (
    ["/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"]
    if sys.platform == "darwin"
    else ["/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"]
)
# A code point that will never be a character: what a font draws for it, it draws for all that it lacks.
_NOTHING = "\uffff"
_LOOK_PX = 24
_MAX_TIMES = 8  # its size that a character or a line may be high or wide; a font's own numbers allow 100,000

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def font_places() -> list[Path]:
    """Return the font folders of common systems."""
    return [Path(place).expanduser() for place in _PLACES]


def font_files(places: Iterable[Path]) -> set[Path]:
    """Find the font files in folders and their subfolders."""
    return {file for place in places for file in place.rglob("*") if file.suffix.lower() in _ENDINGS and file.is_file()}


@functools.lru_cache(maxsize=512)
def load_font(path: str, size_px: int) -> ImageFont.FreeTypeFont:
    """Load a font at a size in pixels, with Pillow's basic layout, which needs no other library."""
    return ImageFont.truetype(path, size_px, layout_engine=ImageFont.Layout.BASIC)


@functools.lru_cache(maxsize=512)
def covered(path: str, characters: str) -> str:
    """Return the characters that a font can draw, without blank ones."""
    try:
        font = load_font(path, _LOOK_PX)
        nothing = _ink(font, _NOTHING)
        inks = {character: _ink(font, character) for character in characters}
    except (OSError, ValueError):  # a damaged font
        return ""
    return "".join(character for character, ink in inks.items() if ink[1] and ink != nothing)


def font_for(text: str, size_px: int) -> Font:
    """Return a font with all characters of a text, or Pillow's own if there is none."""
    path = font_path_for(text)
    return ImageFont.load_default(size_px) if path is None else load_font(path, size_px)


def font_path_for(text: str) -> str | None:
    """Return the machine's font with the most characters of a text; None if the text is ASCII."""
    wanted = "".join(sorted(set(text) - set(" ")))
    best, most = None, 0
    for path in _system_files() if not wanted.isascii() else []:
        num_drawn = len(covered(path, wanted))
        if num_drawn > most:
            best, most = path, num_drawn
        if most == len(wanted):
            break
    return best


@functools.cache
def _system_files() -> list[str]:
    return sorted(str(file) for file in font_files(font_places()) if family_of(file) is not None)


def family_of(file: Path) -> str | None:
    """Such as "DejaVu Sans"; None for a damaged file, enormous lines, or nothing but pictures of a fixed size."""
    try:
        font = load_font(str(file), _LOOK_PX)
        if sum(font.getmetrics()) > _MAX_TIMES * _LOOK_PX:
            return None
        return str(font.getname()[0])
    except (OSError, ValueError):
        return None


def _ink(font: ImageFont.FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    """Size of a character's picture, and its bytes if there is any ink.

    Raises:
        ValueError: It is far larger than the font.
    """
    if max(*map(abs, font.getbbox(character)), font.getlength(character)) > _MAX_TIMES * _LOOK_PX:
        raise ValueError("a character is far larger than the font")
    mask = font.getmask(character)
    content = bytes(mask)
    return mask.size, content if any(content) else b""
