"""HTML of runs for the cells of a notebook, and charts as SVG files for a paper."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.report.format import metric_name, metric_value
from samebits.run_views.compare import compare
from samebits.run_views.history import Curves, RunHistory, read_curve_records
from samebits.run_views.page.build import check_page, comparison_charts, render, write_page
from samebits.run_views.page.chart import ChartLine
from samebits.run_views.page.chart import chart as make_chart
from samebits.run_views.page.sections import run_charts
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import metric_text, step_text

# The charts of a page as SVG files for a paper.


# Points: as wide as a column of most papers.
_WIDTH = 252
_PLOT_HEIGHT = 140
_TOP = 18
_LEFT = 42
_RIGHT = 8
_LINE = 12
# Those of page.css on a light background.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8488a", "#b98200", "#6a51c7", "#2f9fd8", "#5c6672")


def figures(runs: Sequence[RunHistory]) -> dict[str, str]:
    """Draw the charts of a run, or those that compare several, as SVG by file name."""
    if len(runs) == 1:
        charts = run_charts(runs[0])
    else:
        comparison = compare(runs)
        settings = [legend.partition(" ")[2] for legend in comparison.legends]
        # The letters stand for columns of a table, which a paper does not have.
        charts = comparison_charts(
            comparison, settings if len(set(settings)) == len(runs) else comparison.legends
        )
    found: dict[str, str] = {}
    for chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", chart["title"].lower()).strip("-")[:60] or "chart"
        # Names of metrics are of unknown origin, and two may differ only in signs that a file name leaves out.
        found[f"{name}.svg" if f"{name}.svg" not in found else f"{name}-{len(found)}.svg"] = figure(
            chart
        )
    return found


def write_figures(drawn: Mapping[str, str], folder: Path) -> None:
    """Write SVG files into a folder, and none over a file that the user wrote or edited.

    Raises:
        CheckpointError: One cannot be written, or another file has its name.
    """
    for name in drawn:
        check_page(folder / name)
    for name, text in drawn.items():
        write_page(text, folder / name)


def figure(chart: dict[str, Any], *, ink: str = "#000") -> str:
    """Draw a chart as SVG on no background, with texts and axes of a color."""
    width = _WIDTH - _LEFT - _RIGHT
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
    return render(
        "figure.svg",
        chart=chart,
        ink=ink,
        lines=lines,
        width=_WIDTH,
        height=height + (_LINE * len(lines) if has_legend else 0),
        left=_LEFT,
        top=_TOP,
        plot_width=width,
        plot_height=_PLOT_HEIGHT,
    ).lstrip()


# Show runs as HTML for the cells of a notebook: a table, and a run with its curves. Texts are escaped as in a report.
#
# No style sheet and no script: they would act on the whole notebook. Colors suit light and dark themes.


MAX_ROWS = 200
_MAX_METRICS = 12
_INK = "#888888"  # is readable on white and on black


def runs_card(runs: Sequence[RunSummary]) -> str:
    """Return a table of runs."""
    return _card(
        runs[:MAX_ROWS],
        num_left=len(runs) - MAX_ROWS,
        is_named=len({run.monitor for run in runs} - {""}) > 1,
    )


def run_card(run: RunSummary) -> str:
    """Return a run: its row, its metrics and its curves."""
    curves = Curves(read_curve_records(run.path)[0])
    values = [
        (metric_name(name), metric_value(name, value))
        for name, value in run.metrics.items()
        if "/" not in name
    ]
    charts = [
        make_chart(
            "loss",
            "loss",
            [ChartLine(curves.get("train", "loss"), "training"), _validation(curves, "loss")],
        )
    ]
    if run.monitor != "loss":
        charts.append(
            make_chart(metric_name(run.monitor), run.monitor, [_validation(curves, run.monitor)])
        )
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
