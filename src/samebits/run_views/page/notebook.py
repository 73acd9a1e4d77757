"""Show runs as HTML for the cells of a notebook: a table, and a run with its curves. Texts are escaped as in a report.

No style sheet and no script: they would act on the whole notebook. Colors suit light and dark themes.
"""

from collections.abc import Sequence

from samebits.report.format import metric_name, metric_value
from samebits.run_views.curves import Curves, read_curve_records
from samebits.run_views.page.chart import ChartLine, chart
from samebits.run_views.page.figures import figure
from samebits.run_views.page.render import render
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import metric_text, step_text

MAX_ROWS = 200
_MAX_METRICS = 12
_INK = "#888888"  # is readable on white and on black


def runs_card(runs: Sequence[RunSummary]) -> str:
    """Return a table of runs."""
    return _card(runs[:MAX_ROWS], num_left=len(runs) - MAX_ROWS, is_named=len({run.monitor for run in runs} - {""}) > 1)


def run_card(run: RunSummary) -> str:
    """Return a run: its row, its metrics and its curves."""
    curves = Curves(read_curve_records(run.path)[0])
    values = [(metric_name(name), metric_value(name, value)) for name, value in run.metrics.items() if "/" not in name]
    charts = [chart("loss", "loss", [ChartLine(curves.get("train", "loss"), "training"), _validation(curves, "loss")])]
    if run.monitor != "loss":
        charts.append(chart(metric_name(run.monitor), run.monitor, [_validation(curves, run.monitor)]))
    drawings = [figure(each, ink=_INK) for each in charts if each is not None]
    shown = ", ".join(f"{name} {value}" for name, value in values[:_MAX_METRICS])
    return _card([run], run.reason, shown, drawings)


def _card(
    runs: Sequence[RunSummary],
    reason: str = "",
    metrics: str = "",
    drawings: Sequence[str] = (),
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
    )


def _validation(curves: Curves, name: str) -> ChartLine:
    return ChartLine(curves.get("eval", name), "validation", 1)
