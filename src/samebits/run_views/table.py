"""The table of `samebits runs`."""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from samebits.errors import printable
from samebits.report.format import clock, metric_name, metric_value
from samebits.run_views.files import plain_text
from samebits.run_views.select import value_of
from samebits.run_views.summary import RunSummary

STYLES = {"running": "bold cyan", "stopped": "yellow", "failed": "bold red", "done": "green", "waiting": "dim",
          "pruned": "magenta"}  # fmt: skip
_GAP = 2
_LEFT_OUT = "..."  # not every terminal has the one character for it
_MAX_NAME, _MAX_CELL = 32, 16
# Columns that a narrow terminal leaves out, the first one first.
_OPTIONAL = ("loss", "procs", "recipe", "sha256", "took", "started")
_SHOWN = ("run", "recipe", "state", "procs", "step", "started", "took", "sha256", "loss")
_LEFT = ("run", "recipe", "state", "sha256")


def one_line(text: str) -> str:
    """Return a text of unknown origin as one line without control characters."""
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def cut(text: str, width: int) -> str:
    """Shorten a text in the middle to a number of terminal cells."""
    if cell_len(text) <= width:
        return text
    head = tail = ""
    for index in range(len(text)):
        grown = (head + text[index // 2], tail) if index % 2 == 0 else (head, text[-(index // 2 + 1)] + tail)
        if cell_len("".join(grown)) + len(_LEFT_OUT) > width:
            break
        head, tail = grown
    return f"{head}{_LEFT_OUT}{tail}"


def failure_lines(runs: Sequence[RunSummary]) -> list[str]:
    """Return why runs failed, the last three of them."""
    failed = [run for run in runs if run.state == "failed" and run.reason]
    return [f"{one_line(run.name)} failed: {one_line(run.reason)}" for run in failed[-3:]]


def runs_table(runs: Sequence[RunSummary], folder: Path, width: int, keys: Sequence[str] = ()) -> Text:
    """Lay out runs, one per row.

    Args:
        runs, width: The runs, in order, and columns of the terminal.
        folder: The folder that was searched; names are relative to it.
        keys: Names of values that were filtered or sorted by; each gets a column.
    """
    columns = _columns(runs, folder, keys)
    cells = {name: [one_line(make(run)) for run in runs] for name, make in columns.items()}
    cells["run"] = [cut(cell, _MAX_NAME) for cell in cells["run"]]
    for name in cells:
        if name != "run":
            cells[name] = [cut(cell, _MAX_CELL) for cell in cells[name]]
    cells = {name: values for name, values in cells.items() if name in ("run", "state", *keys) or any(values)}
    heads = {name: cut(one_line(name), _MAX_CELL) for name in cells}
    widths = {name: max(map(cell_len, [heads[name], *cells[name]])) for name in cells}
    for name in _OPTIONAL:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        if name not in keys:
            widths.pop(name, None)
    over = sum(widths.values()) + _GAP * (len(widths) - 1) - width
    if over > 0:
        widths["run"] = max(12, widths["run"] - over)
        cells["run"] = [cut(cell, widths["run"]) for cell in cells["run"]]
    text = Text()
    _add_line(text, heads, widths, dict.fromkeys(widths, "dim"))
    for index, run in enumerate(runs):
        row = {name: cells[name][index] for name in widths}
        _add_line(text, row, widths, {"state": STYLES[run.state]})
    text.right_crop()  # the last line feed
    return text


def _add_line(text: Text, row: Mapping[str, str], widths: Mapping[str, int], styles: Mapping[str, str]) -> None:
    """Append a row. rich's own table takes 2 ms for each."""
    is_first = True
    for name, width in widths.items():
        pad = " " * (width - cell_len(row[name]))
        gap = "" if is_first else " " * _GAP
        left, right = (gap, pad) if name in _LEFT else (gap + pad, "")
        text.append(left)
        text.append(row[name], styles.get(name))
        text.append(right)
        is_first = False
    text.append("\n")


def _columns(runs: Sequence[RunSummary], folder: Path, keys: Sequence[str]) -> dict[str, Callable[[RunSummary], str]]:
    """Return how each column is made, by its title."""
    monitors = {run.monitor for run in runs if run.monitor}
    is_one = len(monitors) == 1
    metric = metric_name(next(iter(monitors))) if is_one else "metric"
    return {
        "run": lambda run: label(run, folder),
        "recipe": lambda run: run.recipe,
        "state": lambda run: run.state,
        "procs": lambda run: f"{run.procs:,}" if run.procs else "",
        "step": step_text,
        metric: lambda run: metric_text(run, is_named=not is_one),
        "loss": lambda run: metric_value("loss", run.metrics["loss"]) if "loss" in run.metrics else "",
        **{key: _value_column(key) for key in keys if key not in _SHOWN and not (is_one and key in monitors)},
        "started": lambda run: when(run.started),
        "took": lambda run: clock(run.took_s) if run.took_s is not None else "",
        "sha256": lambda run: run.weights_sha256[:8],
    }


def label(run: RunSummary, folder: Path) -> str:
    """Return a run's path below the folder that was searched."""
    try:
        name = str(run.path.relative_to(folder))
    except ValueError:
        name = str(run.path)
    return name if name != "." else run.path.absolute().name


def when(seconds: float | None, now: float | None = None) -> str:
    """Format a time as in "09:12" for today, "11-21 09:12" for this year, else "2025-11-21"."""
    if seconds is None:
        return ""
    try:
        at, today = datetime.fromtimestamp(seconds), datetime.fromtimestamp(time.time() if now is None else now)
    except (ValueError, OverflowError, OSError):
        return ""
    if at.date() == today.date():
        return f"{at:%H:%M}"
    return f"{at:%m-%d %H:%M}" if at.year == today.year else f"{at:%Y-%m-%d}"


def step_text(run: RunSummary) -> str:
    """Return the steps done, and of a run that is not complete those of the whole run."""
    if run.state == "done" or not run.num_steps:
        return f"{run.step:,}"
    return f"{run.step:,}/{run.num_steps:,}"


def metric_text(run: RunSummary, *, is_named: bool) -> str:
    """Return the last value of the monitored metric, with the metric's name if asked to; empty if there is none."""
    value = run.metrics.get(run.monitor)
    if value is None:
        return ""
    return f"{metric_name(run.monitor) if is_named else ''} {metric_value(run.monitor, value)}".strip()


def _value_column(key: str) -> Callable[[RunSummary], str]:
    def cell(run: RunSummary) -> str:
        value = value_of(run, key)
        if value is None:
            return "null" if key in run.settings else ""
        if key in run.metrics or key == "best":
            return metric_value(run.monitor if key == "best" else key, value)
        return plain_text(value)

    return cell
