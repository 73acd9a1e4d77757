"""Charts that fill any width: lines are stretched, texts and strokes are not. `page.js` adds the hover."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samebits.errors import printable
from samebits.report.format import metric_value
from samebits.run_views.curves import Curve

_WIDTH, _HEIGHT = 1000, 200  # of the stretched drawing
_MAX_POINTS = 500
_MAX_DOTS = 60  # a line with fewer points has a dot at each
NUM_COLORS = 8

LOG_FROM = 50.0  # ratio of the largest to the smallest value from which a loss has a logarithmic axis


@dataclass(frozen=True)
class AxisScale:
    """Maps values to 0 (bottom) to 1 (top)."""

    low: float  #: Value at the bottom.
    high: float  #: Value at the top.
    is_log: bool = False  #: Whether the axis is logarithmic.

    def position(self, value: float) -> float:
        """Return where a value is, 0 to 1."""
        low, high, value = (
            math.log(max(each, 1e-300)) if self.is_log else each for each in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


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


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart."""

    curve: Curve  #: Its points.
    name: str  #: Its name in the legend.
    color: int = 0  #: Number of its color, from 0.
    is_dashed: bool = False  #: Whether it is dashed, where colors alone do not suffice.


def chart(
    title: str, name: str, lines: Sequence[ChartLine], *, end: float = 0.0, starts_at_zero: bool = False
) -> dict[str, Any] | None:
    """Return what the template of a chart needs, and as "data" what `page.js` reads; None if no line has two points.

    Args:
        end: Epoch at the right end; a later one if a line is longer.
        starts_at_zero: Whether the y axis starts at 0.
    """
    lines = [line for line in lines if len(line.curve)]
    if max((len(line.curve) for line in lines), default=0) < 2:
        return None
    scale = scale_for([line.curve for line in lines], name)
    if starts_at_zero and scale.low > 0 and not scale.is_log:
        scale = AxisScale(0.0, scale.high)
    scale, ticks = _nice(scale)
    end = max(end, *(line.curve.epochs[-1] for line in lines)) or 1.0
    drawn, data = [], []
    for line in lines:
        color = line.color % NUM_COLORS
        # Means of neighbors, where there are more values than a screen shows.
        every, curve = math.ceil(len(line.curve) / _MAX_POINTS), line.curve
        parts = [curve.values[start : start + every] for start in range(0, len(curve), every)]
        lasts = [min(start + every, len(curve)) - 1 for start in range(0, len(curve), every)]
        epochs, steps = [round(curve.epochs[last], 4) for last in lasts], [curve.steps[last] for last in lasts]
        values = [float(f"{sum(part) / len(part):.5g}") for part in parts]
        points = [
            f"{_WIDTH * epoch / end:.1f},{_HEIGHT * (1 - scale.position(value)):.1f}"
            for epoch, value in zip(epochs, values, strict=True)
        ]
        dash, has_dots = " dash" if line.is_dashed else "", len(points) <= _MAX_DOTS
        drawn.append({"name": line.name, "color": color, "dash": dash, "points": points, "has_dots": has_dots})
        data.append({"name": printable(line.name), "color": color, "x": epochs, "step": steps, "y": values})
    last_values = ", ".join(f"{line.name} {metric_value(name, line.curve.values[-1])}" for line in lines)
    # The epochs at which the x axis has a label: 0, the end, and round numbers between them.
    step = max(_round_step(end / 5), 1.0 if end >= 3 else 0.0) or end
    inner = [index * step for index in range(1, int(end / step) + 1) if index * step < end - step / 2]
    half = metric_value(name, 0.5)
    percent = len(half.partition(".")[2]) - 1 if half.endswith("%") else 0  # decimals
    shown = {"end": end, "low": scale.low, "high": scale.high, "log": scale.is_log, "percent": percent}
    return {
        "title": title,
        "label": f"{title}; last values: {last_values}. Left and right arrow keys read single points.",
        "lines": drawn,
        "y_labels": [(1 - scale.position(tick), _tick(name, tick)) for tick in ticks],
        "x_labels": [0.0, *inner, round(end, 2) if end != int(end) else end],
        "size": (_WIDTH, _HEIGHT),
        "data": {**shown, "lines": data},
    }


def _nice(scale: AxisScale) -> tuple[AxisScale, list[float]]:
    """Widen a scale to round numbers, and return these."""
    if scale.is_log:
        low, high = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
        every = max(1, math.ceil((high - low) / 5))
        return AxisScale(10.0**low, 10.0**high, is_log=True), [10.0**power for power in range(low, high + 1, every)]
    span = scale.high - scale.low
    if not math.isfinite(span) or span <= 0:
        return scale, [scale.low, scale.high]
    step = _round_step(span / 4)
    # 1e-9: a border that is a multiple of the step already would otherwise move by rounding.
    low, high = math.floor(scale.low / step + 1e-9), math.ceil(scale.high / step - 1e-9)
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
