"""The charts of a page as SVG files for a paper."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.run_views.compare import compare
from samebits.run_views.history import RunHistory
from samebits.run_views.page.build import comparison_charts
from samebits.run_views.page.render import render
from samebits.run_views.page.sections import run_charts
from samebits.run_views.page.write import check_page, write_page

# Points: as wide as a column of most papers.
_WIDTH, _PLOT_HEIGHT, _TOP, _LEFT, _RIGHT, _LINE = 252, 140, 18, 42, 8, 12
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
        charts = comparison_charts(comparison, settings if len(set(settings)) == len(runs) else comparison.legends)
    found: dict[str, str] = {}
    for chart in charts:
        name = re.sub(r"[^a-z0-9]+", "-", chart["title"].lower()).strip("-")[:60] or "chart"
        # Names of metrics are of unknown origin, and two may differ only in signs that a file name leaves out.
        found[f"{name}.svg" if f"{name}.svg" not in found else f"{name}-{len(found)}.svg"] = figure(chart)
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
    width, height = _WIDTH - _LEFT - _RIGHT, _TOP + _PLOT_HEIGHT + 30
    has_legend = len(chart["lines"]) > 1
    lines = []
    for index, line in enumerate(chart["lines"]):
        places = (map(float, point.split(",")) for point in line["points"])
        # A page stretches its lines; here, they are moved, since not all programs keep the width of a stretched stroke.
        points = [
            f"{_LEFT + width * x / chart['size'][0]:.2f},{_TOP + _PLOT_HEIGHT * y / chart['size'][1]:.2f}"
            for x, y in places
        ]
        legend_y = height + _LINE * (index + 1) - 4 if has_legend else 0
        lines.append({**line, "points": points, "color": _COLORS[line["color"]], "legend_y": legend_y})
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
