"""Show runs as HTML for the cells of a notebook: a table, and a run with its curves. Texts are escaped as in a report.

No style sheet and no script: they would act on the whole notebook. Colors suit light and dark themes.
"""

from __future__ import annotations

from collections.abc import Sequence

from samebits.report.format import clock, metric_name, metric_value
from samebits.run_views.curves import Curve, Curves
from samebits.run_views.page.chart import scale_for
from samebits.run_views.page.markup import Child, Markup, element, joined
from samebits.run_views.record_reader import RecordReader
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import cut, when

MAX_ROWS = 200
_MAX_METRICS = 12
_WIDTH, _HEIGHT, _PAD = 320, 110, 4
_MAX_POINTS = 300
_COLORS = ("#0072b2", "#d55e00")  # training, validation: readable on white and on black
_LEFT = {"style": "text-align: left"}


def runs_card(runs: Sequence[RunSummary]) -> str:
    """Return a table of runs."""
    return _table(runs).html


def _table(runs: Sequence[RunSummary]) -> Markup:
    monitors = {run.monitor for run in runs if run.monitor}
    metric = metric_name(next(iter(monitors))) if len(monitors) == 1 else "metric"
    head = ("run", "recipe", "state", "step", metric, "started", "took", "weights SHA-256")
    rows = [_row(run, is_named=len(monitors) > 1) for run in runs[:MAX_ROWS]]
    table = element(
        "table",
        None,
        element("thead", None, element("tr", None, [element("th", _LEFT, name) for name in head])),
        element("tbody", None, [element("tr", None, [element("td", _LEFT, cell) for cell in row]) for row in rows]),
    )
    left = len(runs) - MAX_ROWS
    return joined([table, element("p", None, f"and {left:,} more") if left > 0 else None])


def run_card(run: RunSummary) -> str:
    """Return a run: its row, its metrics and its curves."""
    curves = Curves()
    curves.add(RecordReader(run.path).poll()[0])
    facts = [(metric_name(name), metric_value(name, value)) for name, value in run.metrics.items() if "/" not in name]
    lines = [
        _drawing("loss", "loss", [curves.get("train", "loss"), curves.get("eval", "loss")]),
        _drawing(metric_name(run.monitor), run.monitor, [Curve(), curves.get("eval", run.monitor)]),
    ]
    reason = element("p", None, element("b", None, "failed: "), run.reason) if run.reason else None
    shown = ", ".join(f"{name} {value}" for name, value in facts[:_MAX_METRICS])
    drawn = [line for line in lines if line is not None]
    return joined([_table([run]), reason, element("p", None, shown) if shown else None, drawn]).html


def _row(run: RunSummary, *, is_named: bool) -> list[Child]:
    value = run.metrics.get(run.monitor)
    metric = "" if value is None else metric_value(run.monitor, value)
    return [
        cut(run.name, 60),
        cut(run.recipe, 40),
        run.state,
        f"{run.step:,}" if run.state == "done" or not run.num_steps else f"{run.step:,}/{run.num_steps:,}",
        f"{cut(metric_name(run.monitor), 40)} {metric}".strip() if is_named and metric else metric,
        when(run.started),
        clock(run.took_s) if run.took_s is not None else "",
        element("code", None, run.weights_sha256[:8]) if run.weights_sha256 else "",
    ]


def _drawing(title: str, name: str, curves: Sequence[Curve]) -> Markup | None:
    """Return curves over the epochs as an SVG; None if none has two points. The first is training, then validation."""
    found = [curve for curve in curves if len(curve) > 1]
    if not found:
        return None
    scale, end = scale_for(found, name), max(curve.epochs[-1] for curve in found) or 1.0
    frame = {"width": _WIDTH, "height": _HEIGHT, "fill": "none", "stroke": "#888888", "stroke-opacity": 0.5}
    lines = [element("rect", frame)]
    for curve, color in zip(curves, _COLORS, strict=True):
        every = max(1, len(curve) // _MAX_POINTS)
        points = " ".join(
            f"{_PAD + epoch / end * (_WIDTH - 2 * _PAD):.1f},"
            f"{_PAD + (1 - scale.position(value)) * (_HEIGHT - 2 * _PAD):.1f}"
            for epoch, value in zip(curve.epochs[::every], curve.values[::every], strict=True)
        )
        if len(curve) > 1:
            lines.append(element("polyline", {"points": points, "fill": "none", "stroke": color, "stroke-width": 1.5}))
    low, high = metric_value(name, scale.low), metric_value(name, scale.high)
    legend = [
        element("span", {"style": f"color: {color}"}, f" {label}")
        for curve, label, color in zip(curves, ("training", "validation"), _COLORS, strict=True)
        if len(curve) > 1
    ]
    box = {"width": _WIDTH, "height": _HEIGHT, "viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img"}
    return element(
        "div",
        {"style": "display: inline-block; margin: 0 1.5em 0.5em 0"},
        element("div", None, element("b", None, cut(title, 40)), legend, f" {low} to {high}, epoch 0 to {end:g}"),
        element("svg", box, lines),
    )
