"""Charts as SVG: the curves of a run, for its folder, a report, a notebook and a paper.

A chart is drawn once, on a plane of 1000 x 200 that a page stretches to any width; `figure` moves it to fixed axes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined  # a requirement of torch
from markupsafe import Markup

from samebits.errors import printable
from samebits.plain_file import number, shorten
from samebits.report.format import metric_name, metric_value
from samebits.storage.run_folder import write_atomically

# The curves of a run: its records by kind and name, thinned while they are collected.


MAX_POINTS = 1000  # of a curve: more than a screen has columns
_MAX_CURVES = 200
_NO_VALUES = ("kind", "step", "epoch")
KINDS = ("train", "eval", "ranks")
_RANK = re.compile(r"rank_(\d{1,4})_ms")


@dataclass
class Curve:
    """Values of one name over the epochs of a run.

    Neighbors are averaged once there are too many, so that a run of any length takes little memory.
    """

    #: Epochs done, with a fraction inside an epoch.
    epochs: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  #: Steps done.
    values: list[float] = field(default_factory=list)  #: The values.
    _every: int = 1
    _pending: list[float] = field(default_factory=list)
    last: float | None = None

    def add(self, step: int, epoch: float, value: float) -> None:
        """Append a value."""
        self.last = value
        self._pending.append(value)
        if len(self._pending) < self._every:
            return
        self.epochs.append(epoch)
        self.steps.append(step)
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.values) >= 2 * MAX_POINTS:
            # In pairs: the mean of both, at the later one's position.
            self.values = [
                (a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)
            ]
            self.epochs = self.epochs[1::2]
            self.steps = self.steps[1::2]
            self._every *= 2

    def __len__(self) -> int:
        return len(self.values)


class Curves:
    """All curves of a run, from its records."""

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        #: (kind of the record, name of the value) -> curve.
        self.by_name: dict[tuple[str, str], Curve] = {}
        self.num_records = 0
        for record in records:
            self.num_records += 1
            kind = record.get("kind")
            epoch = number(record.get("epoch"))
            if kind not in KINDS or epoch is None or epoch < 0:
                continue
            for name, value in record.items():
                if name in _NO_VALUES or (converted := number(value)) is None:
                    continue
                key = (kind, shorten(name, 80))
                curve = self.by_name.get(key)
                if curve is None:
                    if len(self.by_name) >= _MAX_CURVES:
                        continue
                    curve = self.by_name[key] = Curve()
                curve.add(int(record["step"]), epoch, converted)

    def get(self, kind: str, name: str) -> Curve:
        """Return a curve; an empty one if there is none."""
        return self.by_name.get((kind, name), Curve())

    def names(self, kind: str) -> list[str]:
        """Return the names of the values of a kind of records, in the order of the records."""
        return [name for each, name in self.by_name if each == kind]

    def ranks(self) -> dict[int, Curve]:
        """Return the step time of each rank in milliseconds, by rank."""
        found = {
            int(match[1]): name for name in self.names("ranks") if (match := _RANK.fullmatch(name))
        }
        return {rank: self.get("ranks", found[rank]) for rank in sorted(found)}

    @property
    def last_step(self) -> tuple[int, float]:
        """The last step with a record, and its epoch."""
        points = [
            (curve.steps[-1], curve.epochs[-1]) for curve in self.by_name.values() if len(curve)
        ]
        return max(points, default=(0, 0.0))


# Charts that fill any width: lines are stretched, texts and strokes are not. `page.js` adds the hover.


# of the stretched drawing
_WIDTH = 1000
_HEIGHT = 200
_MAX_POINTS = 500
_MAX_DOTS = 60  # a line with fewer points has a dot at each
NUM_COLORS = 8

LOG_FROM = (
    50.0  # ratio of the largest to the smallest value from which a loss has a logarithmic axis
)


@dataclass(frozen=True)
class AxisScale:
    """Maps values to 0 (bottom) to 1 (top)."""

    low: float  #: Value at the bottom.
    high: float  #: Value at the top.
    is_log: bool = False  #: Whether the axis is logarithmic.

    def position(self, value: float) -> float:
        """Return where a value is, 0 to 1."""
        low, high, value = (
            math.log(max(each, 1e-300)) if self.is_log else each
            for each in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def scale_for(curves: Sequence[Curve], name: str) -> AxisScale:
    """Choose the y axis for curves of one name."""
    values = [value for curve in curves for value in curve.values]
    low = min(values)
    high = max(values)
    if "loss" in name and low > 0 and high > LOG_FROM * low:
        return AxisScale(low, high, is_log=True)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return AxisScale(low - pad, high + pad)
    return AxisScale(low, high)


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart."""

    curve: Curve  #: Its points.
    name: str  #: Its name in the legend.
    color: int = 0  #: Number of its color, from 0.
    is_dashed: bool = False  #: Whether it is dashed, where colors alone do not suffice.
    band: tuple[Curve, Curve] | None = None  #: The lowest and the highest values around it.


def mean_line(curves: Sequence[Curve], name: str, color: int) -> ChartLine:
    """Return the mean of curves of equal steps, with the band from the lowest to the highest, while all have values."""
    rows = list(zip(*(curve.values for curve in curves), strict=False))
    first = curves[0]

    def of(function: Callable[[Sequence[float]], float]) -> Curve:
        size = len(rows)
        return Curve(first.epochs[:size], first.steps[:size], [function(row) for row in rows])

    band = (of(min), of(max)) if len(curves) > 1 else None
    return ChartLine(of(fmean), name, color % NUM_COLORS, color >= NUM_COLORS, band)


def chart(
    title: str,
    name: str,
    lines: Sequence[ChartLine],
    *,
    end: float = 0.0,
    starts_at_zero: bool = False,
) -> dict[str, Any] | None:
    """Return what the template of a chart needs, and as "data" what `page.js` reads; None if no line has two points.

    Args:
        end: Epoch at the right end; a later one if a line is longer.
        starts_at_zero: Whether the y axis starts at 0.
    """
    lines = [line for line in lines if len(line.curve)]
    if max((len(line.curve) for line in lines), default=0) < 2:
        return None
    drawn_curves = [curve for line in lines for curve in (line.curve, *(line.band or ()))]
    scale = scale_for(drawn_curves, name)
    if starts_at_zero and scale.low > 0 and not scale.is_log:
        scale = AxisScale(0.0, scale.high)
    scale, ticks = _nice(scale)
    end = max(end, *(line.curve.epochs[-1] for line in lines)) or 1.0
    drawn = []
    data = []
    for line in lines:
        color = line.color % NUM_COLORS
        epochs, steps, values = _thinned(line.curve)
        points = _points(line.curve, scale, end)
        low, high = line.band or (Curve(), Curve())
        band = _points(low, scale, end) + _points(high, scale, end)[::-1]
        dash = " dash" if line.is_dashed else ""
        has_dots = len(points) <= _MAX_DOTS
        drawn.append(
            {
                "name": line.name,
                "color": color,
                "dash": dash,
                "points": points,
                "band": band,
                "has_dots": has_dots,
            }
        )
        data.append(
            {"name": printable(line.name), "color": color, "x": epochs, "step": steps, "y": values}
        )
    last_values = ", ".join(
        f"{line.name} {metric_value(name, line.curve.values[-1])}" for line in lines
    )
    # The epochs at which the x axis has a label: 0, the end, and round numbers between them.
    step = max(_round_step(end / 5), 1.0 if end >= 3 else 0.0) or end
    inner = [
        index * step for index in range(1, int(end / step) + 1) if index * step < end - step / 2
    ]
    half = metric_value(name, 0.5)
    percent = len(half.partition(".")[2]) - 1 if half.endswith("%") else 0  # decimals
    shown = {
        "end": end,
        "low": scale.low,
        "high": scale.high,
        "log": scale.is_log,
        "percent": percent,
    }
    return {
        "title": title,
        "label": f"{title}; last values: {last_values}. Left and right arrow keys read single points.",
        "lines": drawn,
        "y_labels": [(1 - scale.position(tick), _tick(name, tick)) for tick in ticks],
        "x_labels": [0.0, *inner, round(end, 2) if end != int(end) else end],
        "size": (_WIDTH, _HEIGHT),
        "data": {**shown, "lines": data},
    }


def _thinned(curve: Curve) -> tuple[list[float], list[int], list[float]]:
    """Return epochs, steps and values: means of neighbors, where there are more values than a screen shows."""
    every = max(1, math.ceil(len(curve) / _MAX_POINTS))
    parts = [curve.values[start : start + every] for start in range(0, len(curve), every)]
    lasts = [min(start + every, len(curve)) - 1 for start in range(0, len(curve), every)]
    epochs = [round(curve.epochs[last], 4) for last in lasts]
    values = [float(f"{sum(part) / len(part):.5g}") for part in parts]
    return epochs, [curve.steps[last] for last in lasts], values


def _points(curve: Curve, scale: AxisScale, end: float) -> list[str]:
    epochs, _, values = _thinned(curve)
    return [
        f"{_WIDTH * epoch / end:.1f},{_HEIGHT * (1 - scale.position(value)):.1f}"
        for epoch, value in zip(epochs, values, strict=True)
    ]


def _nice(scale: AxisScale) -> tuple[AxisScale, list[float]]:
    """Widen a scale to round numbers, and return these."""
    if scale.is_log:
        low = math.floor(math.log10(scale.low))
        high = math.ceil(math.log10(scale.high))
        every = max(1, math.ceil((high - low) / 5))
        return AxisScale(10.0**low, 10.0**high, is_log=True), [
            10.0**power for power in range(low, high + 1, every)
        ]
    span = scale.high - scale.low
    if not math.isfinite(span) or span <= 0:
        return scale, [scale.low, scale.high]
    step = _round_step(span / 4)
    # 1e-9: a border that is a multiple of the step already would otherwise move by rounding.
    low = math.floor(scale.low / step + 1e-9)
    high = math.ceil(scale.high / step - 1e-9)
    return AxisScale(low * step, high * step), [index * step for index in range(low, high + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)


def _tick(name: str, value: float) -> str:
    if metric_value(name, 0.5).endswith("%"):
        return f"{100 * value:.4g}%"
    if abs(value) >= 10_000 or (value and abs(value) < 0.0001):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


# The same charts with fixed axes, as SVG.


# Points: as wide as a column of most papers.
_COLUMN = 252
_PLOT_HEIGHT = 140
_TOP = 18
_LEFT = 42
_RIGHT = 8
_LINE = 12
# Those of page.css on a light background.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8488a", "#b98200", "#6a51c7", "#2f9fd8", "#5c6672")


@cache
def templates(package: str) -> Environment:
    """Return the templates of a package. Texts of strangers are escaped where a template writes them."""
    return Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        # HTML has no form for control characters; changes of the text direction could hide a part of a line.
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelled name is an error, not an empty text.
        undefined=StrictUndefined,
    )


def file_name(title: str) -> str:
    """Return the name of a chart's file."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60] or "chart"


def draw_curves(
    records: Iterable[Mapping[str, Any]], folder: Path, monitor: tuple[str, str]
) -> None:
    """Draw the loss of a run in training and validation, and its monitored metric, as two SVG files in a folder.

    Args:
        records: Its records, as `metrics.jsonl` has them.
        monitor: Name of the metric, and "max" or "min".

    Raises:
        CheckpointError: A file cannot be written.
    """
    curves = Curves(records)
    metric, better = monitor
    evaluated = curves.get("eval", metric)
    best = (max if better == "max" else min)(evaluated.values, default=0.0)
    loss = [
        ChartLine(curves.get("train", "loss"), "training"),
        ChartLine(curves.get("eval", "loss"), "validation", 1),
    ]
    charts = [chart("Loss", "loss", loss)]
    if metric != "loss":
        title = f"Validation {metric_name(metric)}, best {metric_value(metric, best)}"
        charts.append(chart(title, metric, [ChartLine(evaluated, "validation", 1)]))
    for name, each in zip(("loss", "metric"), charts, strict=False):
        if each is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{name}.svg", figure(each, paper="#fff").encode())


def figure(chart: dict[str, Any], *, ink: str = "#000", paper: str = "none") -> str:
    """Draw a chart as SVG, with texts and axes of one color, on a background of another."""
    width = _COLUMN - _LEFT - _RIGHT
    height = _TOP + _PLOT_HEIGHT + 30
    has_legend = len(chart["lines"]) > 1
    lines = []
    for index, line in enumerate(chart["lines"]):
        # A page stretches its lines; here, they are moved, since not all programs keep the width of a stretched stroke.
        moved = {}
        for part in ("points", "band"):
            places = (map(float, point.split(",")) for point in line[part])
            moved[part] = [
                f"{_LEFT + width * x / chart['size'][0]:.2f},{_TOP + _PLOT_HEIGHT * y / chart['size'][1]:.2f}"
                for x, y in places
            ]
        legend_y = height + _LINE * (index + 1) - 4 if has_legend else 0
        lines.append({**line, **moved, "color": _COLORS[line["color"]], "legend_y": legend_y})
    return (
        templates("samebits.report")
        .get_template("figure.svg.j2")
        .render(
            chart=chart,
            paper=paper,
            ink=ink,
            lines=lines,
            width=_COLUMN,
            height=height + (_LINE * len(lines) if has_legend else 0),
            left=_LEFT,
            top=_TOP,
            plot_width=width,
            plot_height=_PLOT_HEIGHT,
        )
        .lstrip()
    )
