"""Charts as PNG files, drawn with matplotlib: the loss curves of a run.

matplotlib takes a third of a second to import, so it is imported with the first chart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import cannot_write_result
from samebits.report.format import metric_name, metric_value
from samebits.report.pictures import font_path_for

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = Sequence[tuple[float, float]]
Records = Sequence[Mapping[str, Any]]

_FAINT = "#767676"
# Distinguishable with color vision deficiency (Okabe and Ito, 2008).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MAX_POINTS = 1000  # of a line: more are not visible
_LOG_FROM = 20.0  # a loss that falls to a twentieth is drawn on a logarithmic axis


def draw_curves(
    train: Records, evaluations: Records, path: Path, *, monitor: tuple[str, str], name: str
) -> None:
    """Plot the training and validation loss of a run, and its monitored validation metric in a second chart.

    Raises:
        CheckpointError: The PNG cannot be written.
    """
    metric, better = monitor
    with _figure(path, (9.6, 4.0), name) as figure:
        left, right = figure.subplots(1, 2)
        losses = [_points(train, "loss"), _points(evaluations, "loss")]
        for label, points, color in zip(("training", "validation"), losses, _COLORS, strict=False):
            _plot(left, points, label, color)
        values = [y for points in losses for _, y in points]
        # The lowest value has to be above 0, which a logarithmic axis cannot show.
        if values and min(values) > 0 and max(values) > _LOG_FROM * min(values):
            left.set_yscale("log")
        left.set(title=f"{name}: loss", xlabel="epoch")
        points = _points(evaluations, metric)
        _plot(right, points, "validation", _COLORS[1])
        if points:
            best = (max if better == "max" else min)(points, key=lambda point: point[1])
            label = f"best: {metric_value(metric, best[1])} after epoch {best[0]:g}"
            right.plot(
                *best, marker="*", markersize=16, linestyle="", color=_COLORS[2], label=label
            )
        right.set(title=f"{name}: {metric_name(metric)}", xlabel="epoch")
        for axes in (left, right):
            axes.set_xlim(left=0)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()


def _points(records: Records, name: str) -> list[tuple[float, float]]:
    """(epoch, value) of the records that have the value, thinned to what is visible."""
    points = [(record["epoch"], record[name]) for record in records if record.get(name) is not None]
    # The mean of a block, not every n-th point: a single spike would be shown or lost by chance.
    every = -(-len(points) // _MAX_POINTS)
    if every <= 1:
        return points
    parts = [points[start : start + every] for start in range(0, len(points), every)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def _plot(axes: Axes, points: Line, label: str, color: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        marker = "o" if label == "validation" and len(points) <= 50 else None
        axes.plot(x, y, color=color, linewidth=1.5, marker=marker, markersize=5, label=label)


@contextmanager
def _figure(path: Path, inches: tuple[float, float], text: str) -> Iterator[Figure]:
    """Yield an empty figure with fonts for all characters of a text, and write it to a file at the end."""
    # such as a warning that its font cache cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, fontManager

    families = ["DejaVu Sans"]
    if (font := font_path_for(text)) is not None:
        fontManager.addfont(font)
        families.append(FontProperties(fname=font).get_name())
    # Its own defaults: a matplotlibrc in the current folder is not the user's wish for this chart.
    with mpl.rc_context(
        {**mpl.rcParamsDefault, "font.family": families, "font.size": 12, "axes.titlesize": 13}
    ):
        # Figure and Agg canvas without pyplot, which keeps every figure in a global list and may look for a display.
        figure = Figure(figsize=inches, dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for axes in figure.axes:
            axes.grid(color="#e4e4e4")
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Software": "samebits"})
        except OSError as error:
            raise cannot_write_result(path, error) from None
