"""A line chart as a PNG, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Line = Sequence[tuple[float, float]]

_PAPER, _INK, _FAINT, _GRID = (255, 255, 255), (34, 34, 34), (130, 130, 130), (228, 228, 228)
# Dark enough on white, and told apart by people who see few colours (Okabe and Ito, 2008).
_COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (86, 180, 233), (230, 159, 0))
_WIDTH_PX, _HEIGHT_PX, _LEFT_PX, _TOP_PX, _RIGHT_PX, _BOTTOM_PX = 760, 440, 78, 44, 190, 52
_SCALE = 2  # drawn larger and made smaller: lines without steps


def draw_lines(lines: Mapping[str, Line], path: Path, *, title: str, x_name: str, y_name: str) -> None:
    """Draw lines over a common ground that begins at 0.

    Args:
        lines: Points (x, y) by the line's name; a name that begins with "(" is drawn thin and grey.
        path: Where the PNG goes.
        title: Above the chart.
        x_name: What x is, with its unit.
        y_name: What y is, with its unit.
    """
    x_most = max(x for line in lines.values() for x, _ in line)
    y_ticks = ticks(max(y for line in lines.values() for _, y in line))
    y_most = y_ticks[-1]
    image = Image.new("RGB", (_WIDTH_PX * _SCALE, _HEIGHT_PX * _SCALE), _PAPER)
    draw = ImageDraw.Draw(image)
    font, large = ImageFont.load_default(13 * _SCALE), ImageFont.load_default(15 * _SCALE)
    width, height = _WIDTH_PX - _LEFT_PX - _RIGHT_PX, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = x / x_most * width, y / y_most * height
        return (_LEFT_PX + across) * _SCALE, (_TOP_PX + height - up) * _SCALE

    for y in y_ticks:
        draw.line([place(0, y), place(x_most, y)], _GRID, _SCALE)
        draw.text((place(0, y)[0] - 8 * _SCALE, place(0, y)[1]), f"{y:,g}", _INK, font, anchor="rm")
    for x in sorted({x for line in lines.values() for x, _ in line}):
        draw.text((place(x, 0)[0], place(x, 0)[1] + 8 * _SCALE), f"{x:,g}", _INK, font, anchor="mt")
    draw.text((_LEFT_PX * _SCALE, 4 * _SCALE), title, _INK, large)
    draw.text((place(x_most / 2, 0)[0], (_HEIGHT_PX - 8) * _SCALE), x_name, _FAINT, font, anchor="ms")
    draw.text((place(0, y_most)[0], (_TOP_PX - 6) * _SCALE), y_name, _FAINT, font, anchor="ls")
    ends = []
    for number, (name, line) in enumerate(lines.items()):
        is_faint = name.startswith("(")
        colour = _FAINT if is_faint else _COLOURS[number % len(_COLOURS)]
        points = [place(x, y) for x, y in line]
        draw.line(points, colour, (1 if is_faint else 2) * _SCALE, joint="curve")
        if not is_faint:
            for x, y in points:
                draw.ellipse((x - 3 * _SCALE, y - 3 * _SCALE, x + 3 * _SCALE, y + 3 * _SCALE), colour)
        ends.append((points[-1][1], name, colour))
    _label(draw, ends, (_WIDTH_PX - _RIGHT_PX + 10) * _SCALE, font)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.resize((_WIDTH_PX, _HEIGHT_PX), Image.Resampling.LANCZOS).save(path)


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, four to eight of them."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _label(
    draw: ImageDraw.ImageDraw,
    ends: Sequence[tuple[float, str, tuple[int, int, int]]],
    x: float,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Each line's name at its end, pushed down where two would lie on each other."""
    free = 0.0
    for y, name, colour in sorted(ends):
        y = max(y, free)
        draw.text((x, y), name, colour, font, anchor="lm")
        free = y + 17 * _SCALE
