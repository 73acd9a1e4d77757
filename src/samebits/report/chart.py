"""Charts as SVG: the curves of a run, for its folder, a report, a notebook and a paper.

The points of a chart are shares of its width and height. A page stretches it to any width; `figure` has fixed axes.
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


_MAX_POINTS = 500  # of a curve: as many as a screen shows
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
        if len(self.values) >= _MAX_POINTS:
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
    def last_epoch(self) -> float:
        """The epoch of the last record, 0 if there is none."""
        return max((each.epochs[-1] for each in self.by_name.values() if len(each)), default=0.0)


# Charts that fill any width: lines are stretched, texts and strokes are not. `page.js` adds the hover.


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
    curves = [curve for line in lines for curve in (line.curve, *(line.band or ()))]
    scale, ticks = _axis(
        [value for curve in curves for value in curve.values],
        may_be_log="loss" in name,
        starts_at_zero=starts_at_zero,
    )
    end = max(end, *(line.curve.epochs[-1] for line in lines)) or 1.0
    drawn = []
    data = []
    for line in lines:
        color = line.color % NUM_COLORS
        low, high = line.band or (Curve(), Curve())
        drawn.append(
            {
                "name": line.name,
                "color": color,
                "dash": " dash" if line.is_dashed else "",
                "points": _points(line.curve, scale, end),
                "band": _points(low, scale, end) + _points(high, scale, end)[::-1],
                "has_dots": len(line.curve) <= _MAX_DOTS,
            }
        )
        data.append(
            {
                "name": printable(line.name),
                "color": color,
                "x": [round(epoch, 4) for epoch in line.curve.epochs],
                "step": line.curve.steps,
                "y": [float(f"{value:.5g}") for value in line.curve.values],
            }
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
    return {
        "title": title,
        "label": f"{title}; last values: {last_values}. Left and right arrow keys read single points.",
        "lines": drawn,
        "y_labels": [(1 - scale.position(tick), _tick(name, tick)) for tick in ticks],
        "x_labels": [0.0, *inner, round(end, 2) if end != int(end) else end],
        "data": {
            "end": end,
            "low": scale.low,
            "high": scale.high,
            "log": scale.is_log,
            "percent": percent,
            "lines": data,
        },
    }


def _points(curve: Curve, scale: AxisScale, end: float) -> list[tuple[float, float]]:
    """Return the place of each point from the left and from the top, as shares of the plane."""
    return [
        (epoch / end, 1 - scale.position(value))
        for epoch, value in zip(curve.epochs, curve.values, strict=True)
    ]


def _axis(
    values: Sequence[float], *, may_be_log: bool, starts_at_zero: bool
) -> tuple[AxisScale, list[float]]:
    """Choose the y axis, which begins and ends at round numbers, and return those on it."""
    low = min(values)
    high = max(values)
    if may_be_log and low > 0 and high > LOG_FROM * low:
        first = math.floor(math.log10(low))
        last = math.ceil(math.log10(high))
        powers = range(first, last + 1, max(1, math.ceil((last - first) / 5)))
        scale = AxisScale(10.0**first, 10.0**last, is_log=True)
        return scale, [10.0**power for power in powers]
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low -= pad
        high += pad
    if starts_at_zero and low > 0:
        low = 0.0
    if not math.isfinite(high - low):
        return AxisScale(low, high), [low, high]
    step = _round_step((high - low) / 4)
    # 1e-9: a border that is a multiple of the step already would otherwise move by rounding.
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return AxisScale(first * step, last * step), [index * step for index in range(first, last + 1)]


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
    records: Iterable[Mapping[str, Any]], folder: Path, metric: str, best: float | None
) -> None:
    """Draw the loss of a run in training and validation, and its monitored metric, as two SVG files in a folder.

    Args:
        records: Its records, as `metrics.jsonl` has them.
        metric, best: Name of the metric, and its best value; None if no value was a number.

    Raises:
        CheckpointError: A file cannot be written.
    """
    curves = Curves(records)
    loss = [
        ChartLine(curves.get("train", "loss"), "training"),
        ChartLine(curves.get("eval", "loss"), "validation", 1),
    ]
    charts = {"loss": chart("Loss", "loss", loss)}
    if metric != "loss":
        shown = "" if best is None else f", best {metric_value(metric, best)}"
        line = ChartLine(curves.get("eval", metric), "validation", 1)
        charts["metric"] = chart(f"Validation {metric_name(metric)}{shown}", metric, [line])
    for name, each in charts.items():
        if each is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{name}.svg", figure(each, paper="#fff").encode())


def figure(chart: dict[str, Any], *, ink: str = "#000", paper: str = "none") -> str:
    """Draw a chart as SVG, with texts and axes of one color, on a background of another."""
    # The template places each point itself: not all programs keep the width of a stretched stroke.
    template = templates("samebits.report").get_template("figure.svg.j2")
    return template.render(chart=chart, ink=ink, paper=paper, colors=_COLORS).lstrip()
