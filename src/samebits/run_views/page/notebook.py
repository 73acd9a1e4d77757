"""HTML of runs for the cells of a notebook, and charts as SVG files for a paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from samebits.provenance.run_files import RunFiles
from samebits.report.chart import ChartLine, Curves, figure, file_name
from samebits.report.chart import chart as make_chart
from samebits.report.format import metric_name, metric_value
from samebits.run_views.compare import compare
from samebits.run_views.history import RunHistory
from samebits.run_views.page.build import check_page, comparison_charts, render, write_page
from samebits.run_views.page.sections import run_charts
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import metric_text, step_text

# The charts of a page as SVG files for a paper.


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
        name = file_name(chart["title"])
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
    curves = Curves(RunFiles(run.path, is_tolerant=True).records())
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
