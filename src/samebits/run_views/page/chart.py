"""The charts, the timeline and the pictures of a page."""

import base64
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from samebits.errors import printable
from samebits.plain_file import read_plain
from samebits.report.format import metric_value
from samebits.report.format import share as format_share
from samebits.run_views.history import Confusion, Curve, RunHistory
from samebits.run_views.summary import Event, Kind

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


# Where the time of a run went, and its events on a line.


_MAX_LISTED = 120
# Row of each kind on the line, from the top, its sign, and its name.
_SIGNS: dict[Kind, tuple[int, str, str]] = {
    "fault": (14, "M-6-6L6 6M6-6L-6 6", "fault"),
    "warning": (14, "M0-6L6 5H-6Z", "warning"),
    "stop": (14, "M-5-5H5V5H-5Z", "stop"),
    "restart": (38, "M0-6L6 0L0 6L-6 0Z", "restart"),
    "start": (38, "M-5-6L6 0L-5 6Z", "start"),
    "done": (38, "M-6 0L-2 5L6-5", "complete"),
    "evaluation": (38, "M0-6V6", "evaluation"),
    "note": (38, "M0-2V2", "note"),
}
_LINES_ONLY = ("fault", "done", "evaluation", "note")


def time_parts(run: RunHistory) -> list[dict[str, Any]]:
    """Return the share of each part of the training time; nothing for a run without these times."""
    seconds = run.seconds
    training = run.training_s
    if not training:
        return []
    waited = seconds.get("data_wait")
    if waited is None:
        waits = run.curves.get("train", "data_wait")
        waited = training * sum(waits.values) / len(waits) if len(waits) else 0.0
    parts = {"waiting for data": min(waited, training)}
    whole = seconds.get("all", 0.0)
    # Communication is measured since the last start: for a run of several starts, its share of the whole is unknown.
    is_one_start = len([event for event in run.events if event.kind in ("start", "restart")]) <= 1
    if is_one_start and whole >= training:
        parts |= {
            "communication": seconds.get("sending", 0.0),
            "waiting for slower processes": seconds.get("rank_wait", 0.0),
        }
    computing = max(training - sum(parts.values()), 0.0)
    name = (
        "start, evaluation and checkpoints"
        if is_one_start
        else "starts, evaluation, checkpoints, repeated steps"
    )
    other = {name: whole - training} if whole > training else {}
    shown = {
        key: value for key, value in {"computing": computing, **parts, **other}.items() if value > 0
    }
    total = sum(shown.values())
    at = 0.0
    found = []
    for key, value in shown.items():
        share = 100 * value / total
        place = {"start": f"{at:.3f}", "width": f"{share:.3f}"}
        found.append({"name": key, "seconds": value, "share": format_share(share / 100), **place})
        at += share
    return found


def event_line(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return the place of each event on a line of time, and those that are no evaluations for a table below it."""
    known = [event for event in events if event.at > 0]
    if not known:
        return None
    first = known[0].at
    last = known[-1].at
    span = (last - first) or 1.0
    listed = [event for event in known if event.kind != "evaluation"]
    note = (
        f" The first {len(listed) - _MAX_LISTED:,} events are left out."
        if len(listed) > _MAX_LISTED
        else ""
    )
    num_evaluations = len(known) - len(listed)
    summary = f"{num_evaluations:,} evaluation{'s' if num_evaluations != 1 else ''}, shown as short lines."
    return {
        "first": first,
        "last": last,
        "marks": [
            (event, f"{2 + 96 * (event.at - first) / span:.2f}", _sign(event)) for event in known
        ],
        "listed": [(event, _sign(event)) for event in listed[-_MAX_LISTED:]],
        "note": (summary if num_evaluations else "") + note,
    }


def _sign(event: Event) -> dict[str, Any]:
    y, path, name = _SIGNS[event.kind]
    return {"y": y, "path": path, "name": name, "is_line": event.kind in _LINES_ONLY}


# Images and the confusion matrix of the last evaluation, inside the page.


_TITLES = {
    "train_samples": "Training samples after augmentation",
    "confusion": "Confusion matrix",
    "worst": "Validation samples with the largest loss",
    "people": "Validation images with predictions",
}
_MAX_FILE_BYTES = 32 * 1024 * 1024
_MAX_PIXELS = 40_000_000
_PLAIN_BYTES = 200 * 1024  # a larger file is encoded again
_MAX_SIZE_PX = 1400
_MAX_PICTURES = 12
_MAX_MATRIX = 30  # classes; for more, the pairs that were confused most


class Budget:
    """Bytes of images that a page may still take."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Return whether so many bytes are left, and take them."""
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True


def pictures(
    run: Path, budget: Budget, *, has_matrix: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """Return the images of a run, and how many are left out.

    Args:
        run, budget: The run folder, and the bytes of images that the page may still take.
    """
    found = []
    num_left_out = 0
    # the page draws them from numbers
    drawn = ("curves.png", "confusion.png") if has_matrix else ("curves.png",)
    try:
        names = sorted(
            name
            for name in os.listdir(run / "pictures")
            if name.endswith(".png") and name not in drawn
        )
    except OSError:
        names = []
    for path in [run / "pictures" / name for name in names[:_MAX_PICTURES]]:
        image = _encoded(path)
        if image is None or not budget.take(len(image[0])):
            num_left_out += 1
            continue
        title = _TITLES.get(path.stem, path.stem.replace("_", " ")[:100])
        found.append({"title": title, "source": image[0], "width": image[1], "height": image[2]})
    return found, num_left_out


def _encoded(path: Path) -> tuple[str, int, int] | None:
    """Return a PNG file as a data URI with its width and height; None if it is none."""
    from PIL import Image

    try:
        content = read_plain(path, _MAX_FILE_BYTES)
        kind = "png"
        # By the PNG decoder only, whatever the content claims to be (ADR 28). The size is that of its header, before a
        # decoder takes memory for so many pixels.
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            shown: Image.Image = image
            if len(content) > _PLAIN_BYTES:
                shown = image.convert("RGB")
                out = io.BytesIO()
                shown.thumbnail((_MAX_SIZE_PX, 4 * _MAX_SIZE_PX))
                shown.save(out, "WEBP", quality=85)
                content = out.getvalue()
                kind = "webp"
    # Pillow raises SyntaxError for a damaged PNG file.
    except (OSError, ValueError, SyntaxError, TypeError, Image.DecompressionBombError):
        return None
    return (
        f"data:image/{kind};base64,{base64.b64encode(content).decode()}",
        shown.width,
        shown.height,
    )


def matrix(confusion: Confusion) -> dict[str, Any]:
    """Return the rows of a confusion matrix, and for many classes the pairs that were confused most."""
    labels = confusion.labels
    counts = confusion.counts
    rows = []
    for index, (name, row) in enumerate(zip(labels, counts, strict=True)):
        num = sum(row)
        cells = [(value, _heat(value, num, is_right=at == index)) for at, value in enumerate(row)]
        rows.append(
            {
                "name": name,
                "cells": cells,
                "recall": metric_value("recall", row[index] / num) if num else "-",
            }
        )
    pairs = [
        (value, labels[truth], labels[prediction])
        for truth, row in enumerate(counts)
        for prediction, value in enumerate(row)
        if value and truth != prediction
    ]
    pairs.sort(key=lambda pair: -pair[0])
    return {
        "heads": ["", *labels, "recall"],
        "total": sum(map(sum, counts)),
        "correct": sum(row[index] for index, row in enumerate(counts)),
        "rows": rows if len(labels) <= _MAX_MATRIX else None,
        "pairs": [(truth, guess, f"{num:,}") for num, truth, guess in pairs[:15]]
        if len(labels) > 6
        else None,
        "is_upright": len(labels) > 6 or max(map(len, labels)) > 10,
    }


def _heat(value: int, total: int, *, is_right: bool) -> str | None:
    """Return the CSS classes of a cell: a wrong prediction has full depth at a third of the row."""
    if not value or not total:
        return None
    share = value / total if is_right else min(1.0, 3 * value / total)
    return f"{'right' if is_right else 'wrong'} h{max(1, round(10 * share))}"
