"""Show runs as HTML for the cells of a notebook: a table, and a run with its curves. Texts are escaped as in a report.

No style sheet and no script: they would act on the whole notebook. Colors suit light and dark themes.
"""

from collections.abc import Sequence
from typing import Any

from samebits.report.format import metric_name, metric_value
from samebits.run_views.curves import Curve, Curves, read_curve_records
from samebits.run_views.page.chart import scale_for
from samebits.run_views.page.render import render
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import metric_text, step_text

MAX_ROWS = 200
_MAX_METRICS = 12
_WIDTH, _HEIGHT, _PAD = 320, 110, 4
_MAX_POINTS = 300
_LINES = (("training", "#0072b2"), ("validation", "#d55e00"))  # colors that are readable on white and on black


def runs_card(runs: Sequence[RunSummary]) -> str:
    """Return a table of runs."""
    return _card(runs[:MAX_ROWS], num_left=len(runs) - MAX_ROWS, is_named=len({run.monitor for run in runs} - {""}) > 1)


def run_card(run: RunSummary) -> str:
    """Return a run: its row, its metrics and its curves."""
    curves = Curves(read_curve_records(run.path)[0])
    values = [(metric_name(name), metric_value(name, value)) for name, value in run.metrics.items() if "/" not in name]
    drawings = [
        _drawing("loss", [curves.get("train", "loss"), curves.get("eval", "loss")]),
        _drawing(run.monitor, [Curve(), curves.get("eval", run.monitor)]),
    ]
    shown = ", ".join(f"{name} {value}" for name, value in values[:_MAX_METRICS])
    return _card([run], run.reason, shown, [each for each in drawings if each is not None])


def _card(
    runs: Sequence[RunSummary],
    reason: str = "",
    metrics: str = "",
    drawings: Sequence[dict[str, Any]] = (),
    *,
    num_left: int = 0,
    is_named: bool = False,
) -> str:
    monitor = next((run.monitor for run in runs if run.monitor), "")
    return render(
        "notebook.html",
        metric=metric_name(monitor) if monitor and not is_named else "metric",
        rows=[(run, step_text(run), metric_text(run, is_named=is_named)) for run in runs],
        num_left=num_left,
        reason=reason,
        metrics=metrics,
        drawings=drawings,
        width=_WIDTH,
        height=_HEIGHT,
    )


def _drawing(name: str, curves: Sequence[Curve]) -> dict[str, Any] | None:
    """Return curves over the epochs for the template; None if none has two points. Training, then validation."""
    found = [curve for curve in curves if len(curve) > 1]
    if not found:
        return None
    scale, end = scale_for(found, name), max(curve.epochs[-1] for curve in found) or 1.0
    lines = []
    for curve, (label, color) in zip(curves, _LINES, strict=True):
        every = max(1, len(curve) // _MAX_POINTS)
        points = [
            f"{_PAD + epoch / end * (_WIDTH - 2 * _PAD):.1f},"
            f"{_PAD + (1 - scale.position(value)) * (_HEIGHT - 2 * _PAD):.1f}"
            for epoch, value in zip(curve.epochs[::every], curve.values[::every], strict=True)
        ]
        if len(curve) > 1:
            lines.append({"label": label, "color": color, "points": points})
    low, high = metric_value(name, scale.low), metric_value(name, scale.high)
    return {"title": metric_name(name), "lines": lines, "range": f"{low} to {high}, epoch 0 to {end:g}"}
