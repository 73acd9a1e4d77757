"""The table of `samebits runs`."""

import difflib
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from operator import eq, ge, gt, le, lt, ne
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from samebits.config import document
from samebits.config.describe import show
from samebits.errors import ConfigError, one_line
from samebits.provenance.identity import is_free
from samebits.report.format import clock, is_lower_better, metric_name, metric_value
from samebits.run_views.summary import RunSummary

# Which runs a table has, and in which order: `--where optim.lr>0.1`, `--sort top1`.


# Longer operators first: the first match decides.
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": ge,
    "<=": le,
    "!=": ne,
    ">": gt,
    "<": lt,
    "=": eq,
}
_CONDITION = re.compile(rf"\s*([^\s=<>!]+)\s*({'|'.join(_OPERATORS)})\s*(.*?)\s*", re.DOTALL)
# Names of columns, and the attributes of a summary that they show.
_FIELDS = {
    "run": "name",
    "recipe": "recipe",
    "state": "state",
    "step": "step",
    "epoch": "epoch",
    "best": "best",
    "train_loss": "train_loss",
    "started": "started",
    "took": "took_s",
    "procs": "procs",
    "sha256": "weights_sha256",
}
_MAY_BE_EMPTY = ("recipe", "procs", "sha256")  # "" or 0: not known


@dataclass(frozen=True)
class Condition:
    """A condition on a run, such as optim.lr>0.1."""

    key: str  #: A column, a metric or a setting by dotted name.
    operator: str  #: =, !=, >, >=, < or <=.
    value: Any  #: The value to compare with.

    def is_met(self, run: RunSummary) -> bool:
        """Return whether a run meets it. A run without the value, or with one of another type, does not."""
        found = value_of(run, self.key)
        value = self.value
        if found is None and self.key not in run.settings:
            return False
        if self.key == "sha256" and self.operator == "=":
            return str(found).startswith(str(value))
        if _is_number(found) and _is_number(value):
            return _OPERATORS[self.operator](found, value)
        if self.operator in ("=", "!="):
            return _OPERATORS[self.operator](show(found), show(value))
        return (
            isinstance(found, str)
            and isinstance(value, str)
            and _OPERATORS[self.operator](found, value)
        )


def parse_condition(text: str) -> Condition:
    """Parse a condition of the command line. Raises ConfigError if it has another form."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise ConfigError(
            f"--where is {text!r}",
            allowed="KEY=VALUE, also with != > >= < <=: optim.lr>0.1, state=done",
            fix="Put it in quotes, as the shell writes to a file after >: --where 'optim.lr>0.1'.",
        )
    key, operator, value = match.groups()
    if key == "started":
        try:
            return Condition(key, operator, datetime.fromisoformat(value).timestamp())
        except (ValueError, OverflowError, OSError):
            raise ConfigError(
                f"--where has the time {value!r}",
                allowed="2026-11-30 or 2026-11-30T09:30",
                fix="Give such a time.",
            ) from None
    # The hash of a run may have digits only.
    return Condition(
        key, operator, value if key in ("sha256", "run") else document.parse_value(value)
    )


def value_of(run: RunSummary, key: str) -> Any:
    """Return the value of a column, metric or setting; None if the run has none."""
    if key in _FIELDS:
        value = getattr(run, _FIELDS[key])
        return None if key in _MAY_BE_EMPTY and not value else value
    # Settings last, since they are read only where they are needed.
    return run.metrics[key] if key in run.metrics else run.settings.get(key)


def select(
    runs: Sequence[RunSummary],
    conditions: Iterable[Condition],
    sort: str | None,
    *,
    is_reversed: bool = False,
) -> list[RunSummary]:
    """Return the runs that meet all conditions, in order.

    Args:
        sort: A column, metric or setting; None: by start. Metrics are sorted best first.
        is_reversed: Whether the order is reversed. Runs without the value are last either way.

    Raises:
        ConfigError: No run has a value of a condition or of `sort`.
    """
    conditions = list(conditions)
    for key in (*(condition.key for condition in conditions), *([sort] if sort else [])):
        if runs and not any(
            key in _FIELDS or key in run.metrics or key in run.settings for run in runs
        ):
            known = dict.fromkeys(
                [*_FIELDS, *(name for run in runs for name in (*run.metrics, *run.settings))]
            )
            near = difflib.get_close_matches(key, list(known)[:5000], 1)
            raise ConfigError(
                f"no run has a value named {key}",
                allowed="a column, a metric or a setting, such as state, top1 or optim.lr",
                fix=f"Use {near[0]}." if near else "Use a name that `samebits runs --json` prints.",
            )
    kept = [run for run in runs if all(condition.is_met(run) for condition in conditions)]
    key = sort or "started"
    is_metric = any(key in run.metrics for run in kept) or key == "best"
    goes_down = (is_metric and not is_lower_better(key)) != is_reversed
    kept.sort(key=lambda run: run.name)
    present = [run for run in kept if value_of(run, key) is not None]
    # The sort is stable, so runs with equal values stay in the order of their names.
    present.sort(key=lambda run: _sortable(value_of(run, key)), reverse=goes_down)
    return present + [run for run in kept if value_of(run, key) is None]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sortable(value: Any) -> tuple[bool, Any]:
    return (False, float(value)) if _is_number(value) else (True, show(value))


STYLES = {
    "running": "bold cyan", "stopped": "yellow", "failed": "bold red", "done": "green",
}  # fmt: skip
_GAP = 2
_LEFT_OUT = "..."  # not every terminal has the one character for it
_MAX_NAME = 32
_MAX_CELL = 16
# Columns that a narrow terminal leaves out, the first one first.
_OPTIONAL = ("loss", "procs", "recipe", "sha256", "took", "started")
_SHOWN = ("run", "recipe", "state", "procs", "step", "started", "took", "sha256", "loss")
_LEFT = ("run", "recipe", "state", "sha256")


def cut(text: str, width: int) -> str:
    """Shorten a text in the middle to a number of terminal cells."""
    if cell_len(text) <= width:
        return text
    room = width - len(_LEFT_OUT)
    head = set_cell_size(text, (room + 1) // 2).rstrip()
    tail = set_cell_size(text[::-1], room // 2).rstrip()[::-1]
    return f"{head}{_LEFT_OUT}{tail}"


def failure_lines(runs: Sequence[RunSummary]) -> list[str]:
    """Return why runs failed, the last three of them."""
    failed = [run for run in runs if run.state == "failed" and run.reason]
    return [f"{one_line(run.name)} failed: {one_line(run.reason)}" for run in failed[-3:]]


def runs_table(
    runs: Sequence[RunSummary], folder: Path, width: int, keys: Sequence[str] = ()
) -> Table:
    """Lay out runs, one per row.

    Args:
        runs, width: The runs, in order, and columns of the terminal.
        folder: The folder that was searched; names are relative to it.
        keys: Names of values that were filtered or sorted by; each gets a column.
    """
    columns = _columns(runs, folder, keys)
    cells = {}
    for name, make in columns.items():
        most = _MAX_NAME if name == "run" else _MAX_CELL
        values = [cut(one_line(make(run)), most) for run in runs]
        if name in ("run", "state", *keys) or any(values):
            cells[name] = values
    heads = {name: cut(one_line(name), _MAX_CELL) for name in cells}
    widths = {name: max(map(cell_len, [heads[name], *cells[name]])) for name in cells}
    for name in _OPTIONAL:
        if sum(widths.values()) + _GAP * (len(widths) - 1) <= width:
            break
        if name not in keys:
            widths.pop(name, None)
    over = sum(widths.values()) + _GAP * (len(widths) - 1) - width
    if over > 0:
        cells["run"] = [cut(cell, max(12, widths["run"] - over)) for cell in cells["run"]]
    styled: dict[str, list[str | Text]] = {heads[name]: [*cells[name]] for name in widths}
    styled[heads["state"]] = [Text(run.state, STYLES[run.state]) for run in runs]
    return columns_table(styled, _LEFT)


def columns_table(columns: Mapping[str, Sequence[str | Text]], left: Collection[str] = ()) -> Table:
    """Lay out columns by their heads: those named in `left` to the left, all others to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _columns(
    runs: Sequence[RunSummary], folder: Path, keys: Sequence[str]
) -> dict[str, Callable[[RunSummary], str]]:
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
        "loss": lambda run: (
            metric_value("loss", run.metrics["loss"]) if "loss" in run.metrics else ""
        ),
        **{
            key: _value_column(key)
            for key in keys
            if key not in _SHOWN and not (is_one and key in monitors)
        },
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
        at = datetime.fromtimestamp(seconds)
        today = datetime.fromtimestamp(time.time() if now is None else now)
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
    return (
        f"{metric_name(run.monitor) if is_named else ''} {metric_value(run.monitor, value)}".strip()
    )


def _value_column(key: str) -> Callable[[RunSummary], str]:
    def cell(run: RunSummary) -> str:
        value = value_of(run, key)
        if value is None:
            return "null" if key in run.settings else ""
        if key in run.metrics or key == "best":
            return metric_value(run.monitor if key == "best" else key, value)
        return show(value)

    return cell


# Group runs whose settings differ only in the seed: number, mean and standard deviation of their metrics.


TITLE = "mean +- standard deviation over seeds, last evaluation"
_MAX_METRICS = 8
_MAX_KEYS = 4  # of the settings that differ between groups
_MAX_REPEATS_CELL = 24


@dataclass(frozen=True)
class SeedGroup:
    """Complete runs whose settings differ only in the seed."""

    #: The settings that differ from those of other groups, by dotted name.
    settings: dict[str, Any]
    seeds: list[Any]  #: The seeds, each once.
    #: Mean and standard deviation (that of a sample, None for one seed) by name of the metric.
    metrics: dict[str, tuple[float, float | None]]
    paths: list[Path]  #: Their run folders, in the order of the seeds.

    def to_plain(self) -> dict[str, Any]:
        """Return the group as plain JSON."""
        stats = {name: {"mean": mean, "std": std} for name, (mean, std) in self.metrics.items()}
        return {
            "settings": self.settings,
            "n": len(self.seeds),
            "seeds": self.seeds,
            "metrics": stats,
        }


def group_by_setting(runs: Sequence[RunSummary]) -> list[SeedGroup]:
    """Group complete runs by their settings without the seed, best mean first; empty if no group has two seeds."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, RunSummary]] = {}
    # The latest first: of runs with one seed, which are no samples of their own, the earliest stays.
    for run in sorted(runs, key=lambda run: run.started or 0.0, reverse=True):
        if run.state == "done" and "seed" in run.settings:
            groups.setdefault(_key(run), {})[show(run.settings["seed"])] = run
    if all(len(group) < 2 for group in groups.values()):
        return []
    keys = [dict(key) for key in groups]
    names = dict.fromkeys(name for key in keys for name in key)
    differing = [name for name in names if len({key.get(name) for key in keys}) > 1]
    found = []
    for group in groups.values():
        members = [group[seed] for seed in sorted(group, key=lambda seed: (len(seed), seed))]
        settings = {name: members[0].settings.get(name) for name in differing}
        found.append(
            SeedGroup(
                settings,
                [run.settings["seed"] for run in members],
                _stats(members),
                [run.path for run in members],
            )
        )
    monitor = next((run.monitor for run in runs if run.monitor), "")
    sign = 1.0 if is_lower_better(monitor) else -1.0
    return sorted(
        found,
        key=lambda each: (
            sign * each.metrics[monitor][0] if monitor in each.metrics else float("inf")
        ),
    )


def setting_text(group: SeedGroup) -> str:
    """Return the settings of a group as the start of a legend; "" if there is one group."""
    keys = list(group.settings)[:_MAX_KEYS]
    return "".join(f"{key}={show(group.settings[key])} " for key in keys)


def seed_cells(groups: Sequence[SeedGroup]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table of groups."""
    keys = list(groups[0].settings)[:_MAX_KEYS]
    metrics = list(dict.fromkeys(name for group in groups for name in group.metrics))
    rows = [
        [
            *(show(group.settings[key]) for key in keys),
            str(len(group.seeds)),
            *(
                _mean(name, *group.metrics[name]) if name in group.metrics else ""
                for name in metrics
            ),
        ]
        for group in groups
    ]
    return [*keys, "n", *map(metric_name, metrics)], rows


def seed_table(groups: Sequence[SeedGroup], width: int) -> Table:
    """Lay out groups, at least one, for a terminal; metrics that do not fit in its width are left out."""
    heads, rows = seed_cells(groups)
    columns: dict[str, list[str]] = {}
    for head, *cells in zip(heads, *rows, strict=True):
        shown = [cut(one_line(cell), _MAX_REPEATS_CELL) for cell in (head, *cells)]
        width -= max(map(cell_len, shown)) + _GAP
        if width < -_GAP and columns:
            break
        columns[shown[0]] = shown[1:]
    return columns_table(columns)


def _key(run: RunSummary) -> tuple[tuple[str, str], ...]:
    # Settings without effect on the result may differ. With early stopping, those of the validation have one; and equal
    # settings with another folder of data are no repeat.
    has_early_stop = run.settings.get("stop_early.patience") is not None
    return tuple(
        (name, show(value))
        for name, value in run.settings.items()
        if name != "seed" and (has_early_stop or name.startswith("data.") or not is_free(name))
    )


def _stats(runs: Sequence[RunSummary]) -> dict[str, tuple[float, float | None]]:
    """Return mean and deviation of each metric that all runs have, the monitored one first."""
    names = dict.fromkeys([runs[0].monitor, *runs[0].metrics])
    shared = [
        name for name in names if "/" not in name and all(name in run.metrics for run in runs)
    ]
    found: dict[str, tuple[float, float | None]] = {}
    for name in shared[:_MAX_METRICS]:
        values = [run.metrics[name] for run in runs]
        with suppress(
            OverflowError
        ):  # values near the end of the range, which only a damaged file has
            found[name] = (
                statistics.fmean(values),
                statistics.stdev(values) if len(values) > 1 else None,
            )
    return found


def _mean(name: str, mean: float, deviation: float | None) -> str:
    """Format a mean and its deviation with as many decimals."""
    shown = metric_value(name, mean)
    if deviation is None:
        return shown
    if shown.endswith("%") or "e" in shown:
        return f"{shown} +- {metric_value(name, deviation)}"
    return f"{shown} +- {deviation:.{len(shown.partition('.')[2])}f}"
