"""Find a font of the machine for a text in any script."""

import functools
import sys
from pathlib import Path

from PIL import ImageFont

_ENDINGS = {".ttf", ".otf", ".ttc"}
_FOLDERS = (
    ["/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"]
    if sys.platform == "darwin"
    else ["/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"]
)
# A code point that will never be a character: a font draws the same glyph for it as for each character it lacks.
_MISSING = "\uffff"
_PROBE_PX = 24  # font size at which fonts are examined

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@functools.lru_cache(maxsize=512)
def load_font(path: str, size_px: int) -> ImageFont.FreeTypeFont:
    """Load a font at a size in pixels, with Pillow's basic layout, which requires no other library."""
    # Without it, Pillow uses libraqm where that is installed, and one text would be drawn differently on two machines.
    return ImageFont.truetype(path, size_px, layout_engine=ImageFont.Layout.BASIC)


@functools.lru_cache(maxsize=512)
def covered(path: str, characters: str) -> str:
    """Return those of `characters` that the font at `path` can draw, without blank ones; "" for a damaged font."""
    try:
        font = load_font(path, _PROBE_PX)
        missing = _ink(font, _MISSING)
        inks = {character: _ink(font, character) for character in characters}
    except (OSError, ValueError):  # a damaged font
        return ""
    return "".join(character for character, ink in inks.items() if ink[1] and ink != missing)


def font_for(text: str, size_px: int) -> Font:
    """Load the font of `font_path_for` at a size in pixels, or Pillow's default font if there is none."""
    path = font_path_for(text)
    return ImageFont.load_default(size_px) if path is None else load_font(path, size_px)


def font_path_for(text: str) -> str | None:
    """Return the font of the machine that has the most characters of a text; None if it is ASCII or no font has any."""
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
    files = (file for folder in _FOLDERS for file in Path(folder).expanduser().rglob("*"))
    return sorted(str(file) for file in files if file.suffix.lower() in _ENDINGS and file.is_file())


def _ink(font: ImageFont.FreeTypeFont, character: str) -> tuple[tuple[int, int], bytes]:
    """Return the size of a rendered character, and its bytes; no bytes if it is blank."""
    mask = font.getmask(character)
    content = bytes(mask)
    return mask.size, content if any(content) else b""
