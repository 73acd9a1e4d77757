"""Draw a confusion matrix, a sheet of samples and an image with a caption, and save drawings, with Pillow."""

import colorsys
import functools
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from samebits.errors import ConfigError, cannot_write_result
from samebits.report.format import metric_value

# Find a font of the machine for a text in any script.


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
    best = None
    most = 0
    for path in _system_files() if not wanted.isascii() else []:
        num_drawn = len(covered(path, wanted))
        if num_drawn > most:
            best = path
            most = num_drawn
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


ByteArray = npt.NDArray[np.uint8]
Color = tuple[int, int, int]

_PAPER = (255, 255, 255)
_INK = (34, 34, 34)
_FAINT = (118, 118, 118)
_EMPTY = (245, 245, 245)
_CORRECT = (33, 102, 172)
_WRONG = (178, 24, 43)
_SOFTWARE = "samebits"  # metadata that marks a file as a drawing, which may be overwritten
_MARGIN_PX = 24
_CELL_PX = 48
_TEXT_PX = 18
_MAX_NAME_PX = 240
_MAX_LINES = 3  # of each line of a caption
_MAX_CHARS = 200  # of one of them


def draw_confusion(counts: Sequence[Sequence[int]], class_names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix as a PNG: blue where prediction and ground truth agree, red where they differ.

    The color depth of a cell is its share of the row, so that a class with few samples is as visible as one with many.
    A red cell has full depth at a twentieth of the row, since mistakes are few.

    Args:
        counts: Number of samples, as `counts[ground truth][prediction]`.
        class_names, path: Names of the classes, in order, and path of the PNG file.
    """
    font, small = _fonts(class_names)
    names = [_cut(name, font, _MAX_NAME_PX) for name in class_names]
    name_px = max(int(font.getlength(name)) for name in names) + 10
    is_upright = name_px - 10 > _CELL_PX
    num_correct = sum(row[label] for label, row in enumerate(counts))
    num_samples = sum(map(sum, counts))
    title = f"{num_correct:,} of {num_samples:,} correct"
    legend = "rows: ground truth, columns: prediction"
    left = _MARGIN_PX + name_px
    top = _MARGIN_PX + (name_px + 20 if is_upright else 44)
    size = len(names) * _CELL_PX
    head_px = int(font.getlength(title) + small.getlength(legend)) + 3 * _MARGIN_PX
    image = Image.new(
        "RGB", (max(left + size + _MARGIN_PX + 66, head_px), top + size + _MARGIN_PX), _PAPER
    )
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN_PX, _MARGIN_PX - 10), title, _INK, font)
    draw.text((image.width - _MARGIN_PX, _MARGIN_PX - 10), legend, _FAINT, small, anchor="ra")
    draw.text((left + size + 8, top - 8), "recall", _FAINT, small, anchor="ls")
    for label, (name, row) in enumerate(zip(names, counts, strict=True)):
        y = top + label * _CELL_PX
        total = sum(row)
        draw.text((left - 10, y + _CELL_PX // 2), name, _INK, font, anchor="rm")
        middle = left + label * _CELL_PX + _CELL_PX // 2
        if is_upright:
            # Rotated by 90 degrees: the name starts at the middle of its lower edge.
            strip = Image.new("RGB", (int(font.getlength(name)) + 1, 2 * _TEXT_PX), _PAPER)
            ImageDraw.Draw(strip).text((0, _TEXT_PX), name, _INK, font, anchor="lm")
            strip = strip.transpose(Image.Transpose.ROTATE_90)
            image.paste(strip, (middle - strip.width // 2, top - 6 - strip.height))
        else:
            draw.text((middle, top - 8), name, _INK, font, anchor="ms")
        share = metric_value("recall", row[label] / total) if total else "-"
        draw.text((left + size + 8, y + _CELL_PX // 2), share, _INK, small, anchor="lm")
        for prediction, count in enumerate(row):
            strength = (
                min(count / total * (1 if prediction == label else 20), 1.0) if total else 0.0
            )
            x = left + prediction * _CELL_PX
            full = _CORRECT if prediction == label else _WRONG
            color = tuple(
                round(empty + (part - empty) * strength)
                for part, empty in zip(full, _EMPTY, strict=True)
            )
            draw.rectangle((x, y, x + _CELL_PX - 2, y + _CELL_PX - 2), color)
            if count:
                text = _PAPER if strength > 0.5 else _INK
                draw.text(
                    (x + _CELL_PX // 2, y + _CELL_PX // 2), _short(count), text, small, anchor="mm"
                )
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def draw_sheet(
    title: str,
    tiles: Sequence[ByteArray],
    captions: Sequence[str],
    path: Path,
    *,
    num_columns: int = 5,
    tile_px: tuple[int, int] = (112, 112),
) -> None:
    """Draw samples side by side as a PNG, each with a caption below it.

    Args:
        title, path: Line above the tiles, and path of the PNG file.
        tiles, captions: Images, (H, W) gray or (H, W, 3) RGB bytes, and a caption for each.
        num_columns, tile_px: Tiles in a row, and (width, height) into which each is fitted, pixels.
    """
    font, small = _fonts([title, *captions])
    (tile_width, tile_height), gap_px, line_px = tile_px, 12, 20
    lines = [_in_lines(caption, small, tile_width + gap_px - 4) for caption in captions]
    caption_px = 6 + line_px * max(map(len, lines), default=1)
    num_rows = max(1, -(-len(tiles) // num_columns))
    width = 2 * _MARGIN_PX + num_columns * (tile_width + gap_px) - gap_px
    top = _MARGIN_PX + 30
    height = top + num_rows * (tile_height + caption_px + gap_px) + _MARGIN_PX - gap_px
    image = Image.new("RGB", (width, height), _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN_PX, _MARGIN_PX - 10), _cut(title, font, width - 2 * _MARGIN_PX), _INK, font)
    for index, (tile, caption) in enumerate(zip(tiles, lines, strict=True)):
        row, column = divmod(index, num_columns)
        x = _MARGIN_PX + column * (tile_width + gap_px)
        y = top + row * (tile_height + caption_px + gap_px)
        sample = Image.fromarray(tile)
        factor = min(tile_width / sample.width, tile_height / sample.height)
        size = (max(1, round(sample.width * factor)), max(1, round(sample.height * factor)))
        # Small images are enlarged without smoothing, which shows the pixels that the model receives.
        resample = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
        image.paste(
            sample.resize(size, resample),
            (x + (tile_width - size[0]) // 2, y + (tile_height - size[1]) // 2),
        )
        for number, line in enumerate(caption):
            draw.text(
                (x + tile_width // 2, y + tile_height + 4 + number * line_px),
                line,
                _INK,
                small,
                anchor="ma",
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def add_caption(image: Image.Image, caption: str) -> Image.Image:
    """Return a copy of an image with a line of text below it."""
    # a large image is looked at from far away
    font = font_for(caption, max(_TEXT_PX, image.height // 40))
    left, top, right, bottom = map(round, font.getbbox(caption))
    size = (
        max(image.width, right - left + 2 * _MARGIN_PX),
        image.height + bottom - top + 2 * _MARGIN_PX,
    )
    canvas = Image.new("RGB", size, _PAPER)
    canvas.paste(image, (0, 0))
    ImageDraw.Draw(canvas).text(
        (_MARGIN_PX - left, image.height + _MARGIN_PX - top), caption, _INK, font
    )
    return canvas


def colors(count: int) -> list[Color]:
    """Return bright colors; successive hues are far apart."""
    # Steps of the golden ratio: each hue falls into the largest gap between those before it.
    found = []
    for hue in ((0.07 + number * 0.618034) % 1 for number in range(count)):
        red, green, blue = colorsys.hls_to_rgb(hue, 0.55, 1.0)
        luma = 0.299 * red + 0.587 * green + 0.114 * blue
        # Dark hues such as blue are lightened more than yellow and green.
        red, green, blue = (
            round(255 * part) for part in colorsys.hls_to_rgb(hue, 0.5 + 0.28 * (1 - luma), 1.0)
        )
        found.append((int(red), int(green), int(blue)))
    return found


def _short(count: int) -> str:
    """Format a count for a cell: pixels are millions."""
    if count < 10**5:
        return str(count)
    size = count / 1000
    for unit in ("k", "M", "G"):
        if size < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g}T"


def _fonts(texts: Sequence[str]) -> tuple[Font, Font]:
    """Return the normal and the small font, with all characters of the texts if the machine has such a font."""
    text = "".join(texts)
    return font_for(text, _TEXT_PX), font_for(text, _TEXT_PX - 2)


def _cut(text: str, font: Font, most_px: float) -> str:
    """Shorten a text to a width; an ellipsis replaces what does not fit."""
    if font.getlength(text) <= most_px:
        return text
    while len(text) > 1 and font.getlength(f"{text}…") > most_px:
        text = text[:-1]
    return f"{text.rstrip()}…"


def _in_lines(text: str, font: Font, most_px: float) -> list[str]:
    """Break each line of a text at spaces, and inside of words that are too long, into at most `_MAX_LINES` lines."""
    lines: list[str] = []
    for part in text.split("\n"):
        # The most characters a line with which all lines fit.
        for count in range(min(len(part), _MAX_CHARS), 0, -1):
            wrapped = textwrap.wrap(part, count, break_on_hyphens=False)
            if all(font.getlength(line) <= most_px for line in wrapped):
                break
        else:
            wrapped = [part.strip()]
        kept = _MAX_LINES - 1
        lines += wrapped[:kept]
        lines += [_cut(" ".join(wrapped[kept:]), font, most_px)] if len(wrapped) > kept else []
    return [line for line in lines if line]


def save_picture(picture: Image.Image, path: Path) -> None:
    """Write a Pillow image, with metadata for `is_drawing`. Raises CheckpointError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = PngInfo()
        # By this mark, --draw knows a file of its own, which it may replace; others are refused (ADR 23).
        metadata.add_text("Software", _SOFTWARE)
        # PNG uses the first, JPEG the second; a format ignores what it does not know.
        picture.save(path, pnginfo=metadata, comment=_SOFTWARE)
    except OSError as error:
        raise cannot_write_result(path, error) from None


def is_drawing(path: Path) -> bool:
    """Return whether a file is a PNG or JPEG written by `save_picture`."""
    try:
        if not path.is_file():
            return False
        with Image.open(path, formats=("PNG", "JPEG")) as picture:
            return _SOFTWARE in (
                picture.info.get("Software"),
                bytes(picture.info.get("comment", b"")).decode("latin-1"),
            )
    # Any of these can come from a file that another program wrote, damaged or huge. None of them is a drawing of ours.
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError):
        return False


def places_for(paths: Sequence[Path], draw: Path) -> dict[Path, Path]:
    """Choose where each file's drawing goes; `draw`: a file for one input, or a folder, existing or without extension.

    Raises:
        ConfigError: `draw` is one file for several images, has an unknown extension, or would overwrite an input.
    """
    targets: dict[Path, Path] = {}
    if not draw.is_dir() and draw.suffix:
        if len(paths) > 1:
            raise ConfigError(
                f"--draw {draw} is one file for {len(paths)} images", fix="Set --draw to a folder."
            )
        # Pillow registers all its formats only here; before, the two tables have the common ones.
        Image.init()
        if (
            draw.suffix.lower() not in Image.EXTENSION
            or Image.EXTENSION[draw.suffix.lower()] not in Image.SAVE
        ):
            raise ConfigError(
                f"--draw {draw}: images can't be written as {draw.suffix}",
                allowed=".png, .jpg, .webp and other formats of Pillow",
                fix=f"Use --draw {draw.with_suffix('.png')}.",
            )
        targets[paths[0]] = draw
    else:
        for path in paths:
            number = 1
            target = draw / f"{path.stem}.png"
            while target in targets.values():
                # Inputs of two folders may have one name, and the second drawing must not replace the first.
                number += 1
                target = draw / f"{path.stem}-{number}.png"
            targets[path] = target
    # Resolved, since a link and a relative path can name the input as well.
    originals = {path.resolve() for path in paths}
    for target in targets.values():
        if target.resolve() in originals:
            raise ConfigError(
                f"--draw {draw} would overwrite the input {target}",
                fix="Set --draw to another folder.",
            )
    return targets
