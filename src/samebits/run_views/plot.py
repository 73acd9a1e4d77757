"""Curves drawn with characters: Braille dots for a line, letters where several runs share a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len
from rich.text import Text

from samebits.report.format import metric_value
from samebits.run_views.curves import Curve
from samebits.run_views.table import one_line

LOG_FROM = 50.0  # ratio of the largest to the smallest value from which a loss has a logarithmic axis
_LABEL = 8  # columns of the labels of the y axis
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # Braille dots by column and row
_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red")


@dataclass(frozen=True)
class PlotLine:
    """A curve in a plot.

    Attributes:
        curve: Its points.
        name: Its name in the legend.
        marker: Character of each point; empty: a line of dots.
    """

    curve: Curve
    name: str
    marker: str = ""


@dataclass(frozen=True)
class AxisScale:
    """Maps values to 0 (bottom) to 1 (top).

    Attributes:
        low: Value at the bottom.
        high: Value at the top.
        is_log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """Return where a value is, 0 to 1."""
        low, high, value = (
            math.log(max(each, 1e-300)) if self.is_log else each for each in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def value(self, position: float) -> float:
        """Return the value at a position, 0 to 1."""
        if self.is_log:
            return math.exp(math.log(self.low) + position * (math.log(self.high) - math.log(self.low)))
        return self.low + position * (self.high - self.low)


def scale_for(curves: Sequence[Curve], name: str) -> AxisScale:
    """Choose the y axis for curves of one name."""
    values = [value for curve in curves for value in curve.values]
    low, high = min(values), max(values)
    if "loss" in name and low > 0 and high > LOG_FROM * low:
        return AxisScale(low, high, is_log=True)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return AxisScale(low - pad, high + pad)
    return AxisScale(low, high)


def plot(
    title: str,
    name: str,
    lines: Sequence[PlotLine],
    size: tuple[int, int],
    *,
    is_ascii: bool = False,
) -> list[Text]:
    """Draw curves over epochs; an empty list if no curve has a point.

    Args:
        title: Text above the plot.
        name: Name of the values, by which they are formatted.
        lines: The curves.
        size: Columns and rows of the whole plot, with title and axes.
        is_ascii: Whether the output cannot show other characters than ASCII.
    """
    lines = [line for line in lines if len(line.curve)]
    width, height = max(size[0] - _LABEL - 2, 8), max(size[1] - 3, 3)
    if not lines:
        return []
    scale = scale_for([line.curve for line in lines], name)
    end = max(max(line.curve.epochs) for line in lines) or 1.0
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for index, line in enumerate(lines):
        style = _STYLES[index % len(_STYLES)]
        draw = _draw_markers if line.marker or is_ascii else _draw_dots
        draw(line, (width, height), lambda x: x / end, scale.position, cells, style)
    legend = Text.assemble((one_line(title), "bold"))
    for index, line in enumerate(lines):
        mark = line.marker or ("." if is_ascii else "─")
        legend.append(f"  {mark} {one_line(line.name)}", _STYLES[index % len(_STYLES)])
    legend.truncate(size[0], overflow="ellipsis" if not is_ascii else "crop")
    bar, corner, dash = ("|", "+", "-") if is_ascii else ("│", "└", "─")
    rows = [legend]
    for row in range(height):
        at = {0: 1.0, height // 2: 1 - (height // 2) / (height - 1), height - 1: 0.0}.get(row)
        tick = metric_value(name, scale.value(at)) if at is not None else ""
        text = Text.assemble((f"{tick:>{_LABEL}} {bar}", "dim"))
        for style, signs in groupby((cells.get((column, row), (" ", "")) for column in range(width)), itemgetter(1)):
            text.append("".join(sign for sign, _ in signs), style)
        rows.append(text)
    rows.append(Text(f"{'':>{_LABEL}} {corner}{dash * width}", "dim"))
    last = f"epoch {end:g}" if end == int(end) else f"epoch {end:.2f}"
    rows.append(Text(f"{'':>{_LABEL}}  0{last:>{width - 1}}", "dim"))
    return rows


def side_by_side(left: list[Text], right: list[Text], width: int) -> list[Text]:
    """Place two plots next to each other.

    Args:
        left: Rows of the left plot.
        right: Rows of the right plot.
        width: Columns of the left plot with the space after it.
    """
    if not left or not right:
        return left or right
    rows = []
    for index in range(max(len(left), len(right))):
        row = left[index].copy() if index < len(left) else Text()
        row.append(" " * max(0, width - cell_len(row.plain)))
        if index < len(right):
            row.append_text(right[index])
        rows.append(row)
    return rows


def _draw_dots(
    line: PlotLine,
    size: tuple[int, int],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    cells: dict[tuple[int, int], tuple[str, str]],
    style: str,
) -> None:
    """Draw a line of Braille dots, 2 by 4 in a cell.

    Args:
        line: The curve.
        size: Columns and rows.
        x_of: Maps an epoch to 0 to 1.
        y_of: Maps a value to 0 to 1.
        cells: Character and style by column and row, which are changed.
        style: The style of the line.
    """
    num_x, num_y = 2 * size[0] - 1, 4 * size[1] - 1
    points = [
        (round(x_of(epoch) * num_x), round((1 - y_of(value)) * num_y))
        for epoch, value in zip(line.curve.epochs, line.curve.values, strict=True)
    ]
    dots: dict[tuple[int, int], int] = {}
    for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[-1]], strict=True):
        num = max(abs(x1 - x0), abs(y1 - y0), 1)
        for part in range(num + 1):
            x, y = x0 + (x1 - x0) * part // num, y0 + (y1 - y0) * part // num
            cell = (x // 2, y // 4)
            dots[cell] = dots.get(cell, 0) | _DOTS[x % 2][y % 4]
    for cell, bits in dots.items():
        cells[cell] = (chr(0x2800 + bits), style)


def _draw_markers(
    line: PlotLine,
    size: tuple[int, int],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    cells: dict[tuple[int, int], tuple[str, str]],
    style: str,
) -> None:
    """Draw one character for each column that has points; see `_draw_dots`.

    Args:
        line: The curve.
        size: Columns and rows.
        x_of: Maps an epoch to 0 to 1.
        y_of: Maps a value to 0 to 1.
        cells: Character and style by column and row, which are changed.
        style: The style of the characters.
    """
    by_column: dict[int, list[float]] = {}
    for epoch, value in zip(line.curve.epochs, line.curve.values, strict=True):
        by_column.setdefault(round(x_of(epoch) * (size[0] - 1)), []).append(value)
    for column, values in by_column.items():
        row = round((1 - y_of(sum(values) / len(values))) * (size[1] - 1))
        cells[column, row] = (line.marker or ".", style)
