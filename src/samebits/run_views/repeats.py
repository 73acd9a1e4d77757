"""Group runs whose settings differ only in the seed: number, mean and standard deviation of their metrics."""

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

from samebits.provenance.same_run import is_free
from samebits.report.format import metric_name, metric_value
from samebits.run_views.files import plain_text
from samebits.run_views.select import is_lower_better
from samebits.run_views.summary import RunSummary
from samebits.run_views.table import cut, one_line

TITLE = "mean +- standard deviation over seeds, last evaluation"
_MAX_METRICS = 8
_MAX_KEYS = 4  # of the settings that differ between groups
_MAX_CELL = 24


@dataclass(frozen=True)
class SeedGroup:
    """Complete runs whose settings differ only in the seed."""

    settings: dict[str, Any]  #: The settings that differ from those of other groups, by dotted name.
    seeds: list[Any]  #: The seeds, each once.
    #: Mean and standard deviation (that of a sample, None for one seed) by name of the metric.
    metrics: dict[str, tuple[float, float | None]]

    def to_plain(self) -> dict[str, Any]:
        """Return the group as plain JSON."""
        stats = {name: {"mean": mean, "std": std} for name, (mean, std) in self.metrics.items()}
        return {"settings": self.settings, "n": len(self.seeds), "seeds": self.seeds, "metrics": stats}


def group_by_setting(runs: Sequence[RunSummary]) -> list[SeedGroup]:
    """Group complete runs by their settings without the seed, best mean first; empty if no group has two seeds."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, RunSummary]] = {}
    # The latest first: of runs with one seed, which are no samples of their own, the earliest stays.
    for run in sorted(runs, key=lambda run: run.started or 0.0, reverse=True):
        if run.state == "done" and "seed" in run.settings:
            groups.setdefault(_key(run), {})[plain_text(run.settings["seed"])] = run
    if all(len(group) < 2 for group in groups.values()):
        return []
    keys = [dict(key) for key in groups]
    names = dict.fromkeys(name for key in keys for name in key)
    differing = [name for name in names if len({key.get(name) for key in keys}) > 1]
    found = []
    for group in groups.values():
        members = [group[seed] for seed in sorted(group, key=lambda seed: (len(seed), seed))]
        settings = {name: members[0].settings.get(name) for name in differing}
        found.append(SeedGroup(settings, [run.settings["seed"] for run in members], _stats(members)))
    monitor = next((run.monitor for run in runs if run.monitor), "")
    sign = 1.0 if is_lower_better(monitor) else -1.0
    return sorted(found, key=lambda each: sign * each.metrics[monitor][0] if monitor in each.metrics else float("inf"))


def seed_cells(groups: Sequence[SeedGroup]) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of a table of groups."""
    keys = list(groups[0].settings)[:_MAX_KEYS]
    metrics = list(dict.fromkeys(name for group in groups for name in group.metrics))
    rows = [
        [
            *(plain_text(group.settings[key]) for key in keys),
            str(len(group.seeds)),
            *(_mean(name, *group.metrics[name]) if name in group.metrics else "" for name in metrics),
        ]
        for group in groups
    ]
    return [*keys, "n", *map(metric_name, metrics)], rows


def seed_lines(groups: Sequence[SeedGroup], width: int) -> list[str]:
    """Lay out groups, at least one, for a terminal; metrics that do not fit in its width are left out."""
    heads, rows = seed_cells(groups)
    lines = [""] * (len(rows) + 1)
    for column in zip(heads, *rows, strict=True):
        cells = [cut(one_line(cell), _MAX_CELL) for cell in column]
        size = max(map(cell_len, cells))
        if cell_len(lines[0]) + 2 + size > width and lines[0]:
            break
        gap = "  " if lines[0] else ""
        lines = [f"{line}{gap}{' ' * (size - cell_len(cell))}{cell}" for line, cell in zip(lines, cells, strict=True)]
    return [TITLE, *lines]


def _key(run: RunSummary) -> tuple[tuple[str, str], ...]:
    # Settings without effect on the result may differ. With early stopping, those of the validation have one; and equal
    # settings with another folder of data are no repeat.
    has_early_stop = run.settings.get("stop_early.patience") is not None
    return tuple(
        (name, plain_text(value))
        for name, value in run.settings.items()
        if name != "seed" and (has_early_stop or name.startswith("data.") or not is_free(name))
    )


def _stats(runs: Sequence[RunSummary]) -> dict[str, tuple[float, float | None]]:
    """Return mean and deviation of each metric that all runs have, the monitored one first."""
    names = dict.fromkeys([runs[0].monitor, *runs[0].metrics])
    shared = [name for name in names if "/" not in name and all(name in run.metrics for run in runs)]
    found: dict[str, tuple[float, float | None]] = {}
    for name in shared[:_MAX_METRICS]:
        values = [run.metrics[name] for run in runs]
        with suppress(OverflowError):  # values near the end of the range, which only a damaged file has
            found[name] = (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    return found


def _mean(name: str, mean: float, deviation: float | None) -> str:
    """Format a mean and its deviation with as many decimals."""
    shown = metric_value(name, mean)
    if deviation is None:
        return shown
    if shown.endswith("%") or "e" in shown:
        return f"{shown} +- {metric_value(name, deviation)}"
    return f"{shown} +- {deviation:.{len(shown.partition('.')[2])}f}"
