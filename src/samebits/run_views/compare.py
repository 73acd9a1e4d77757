"""Several runs side by side: settings that differ, metrics, time and environment."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from samebits.config.describe import show
from samebits.errors import one_line
from samebits.plain_file import shorten
from samebits.provenance.identity import is_free
from samebits.report.format import duration, metric_name, metric_value
from samebits.report.format import share as format_share
from samebits.run_views.history import RunHistory
from samebits.run_views.table import STYLES, TITLE, cut, group_by_setting, seed_table

MISSING = "-"
_MAX_LEGEND = 3  # settings in a legend
# Each run hashes a few samples that its seed chooses, read with a key that its seed determines.
_SAMPLE = re.compile(r"(.+ )?sample \d+")
SECTIONS = (
    "settings",
    "other settings",
    "metrics",
    "time",
    "environment",
    "code and data",
    "result",
)


@dataclass(frozen=True)
class ComparedValue:
    """A value of several runs."""

    section: str  #: One of `SECTIONS`.
    name: str  #: What it is.
    values: tuple[str, ...]  #: Its text in each run; MISSING if a run has none.

    @property
    def is_equal(self) -> bool:
        """Whether all runs have the same value."""
        return len(set(self.values)) == 1


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    runs: Sequence[RunHistory]  #: The runs.
    rows: Sequence[ComparedValue]  #: The values.
    num_equal: int  #: Number of settings that are equal in all runs.

    def section(self, name: str) -> list[ComparedValue]:
        """Return the values of a section."""
        return [row for row in self.rows if row.section == name]

    @property
    def letters(self) -> list[str]:
        """A letter for each run."""
        return [chr(ord("a") + index) if index < 26 else "*" for index in range(len(self.runs))]

    @property
    def legends(self) -> list[str]:
        """A letter for each run, with the settings that differ; with the name if there are none, or too many."""
        rows = sorted(self.section("settings"), key=lambda row: row.name == "seed")
        names = [run.name for run in self.runs]
        if 0 < len(rows) <= _MAX_LEGEND:
            names = [
                " ".join(f"{row.name}={shorten(row.values[index], 24)}" for row in rows)
                for index in range(len(self.runs))
            ]
        return [f"{letter} {name}" for letter, name in zip(self.letters, names, strict=True)]

    def to_plain(self) -> dict[str, Any]:
        """Return the comparison as plain JSON."""
        return {
            "runs": [run.summary.to_plain() for run in self.runs],
            "equal_settings": self.num_equal,
            **{
                name.replace(" ", "_"): {row.name: list(row.values) for row in self.section(name)}
                for name in SECTIONS
            },
        }


def compare(runs: Sequence[RunHistory]) -> Comparison:
    """Compare runs. Settings, environment, code and data are listed where they differ."""
    settings = [run.summary.settings for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    # As JSON, which distinguishes true and 1; "" where a run does not have the setting.
    texts = {
        name: {json.dumps(each[name], default=str) if name in each else "" for each in settings}
        for name in names
    }
    differing = [name for name in names if len(texts[name]) > 1]
    rows = [
        ComparedValue(
            "other settings" if is_free(name) else "settings",
            name,
            tuple(show(each[name]) if name in each else MISSING for each in settings),
        )
        for name in differing
    ]
    rows += _measured(runs)
    rows += _differing("environment", [run.environment for run in runs])
    rows += _without_samples(
        runs, _differing("code and data", [{**run.code, **run.data} for run in runs])
    )
    rows += [
        ComparedValue("result", "state", tuple(run.summary.state for run in runs)),
        ComparedValue(
            "result",
            "weights sha256",
            tuple(run.summary.weights_sha256[:16] or MISSING for run in runs),
        ),
    ]
    return Comparison(runs, rows, len(names) - len(differing))


def metric_names(runs: Sequence[RunHistory]) -> list[str]:
    """Return the names of the metrics of evaluations: monitored ones first, without those of single classes."""
    monitors = dict.fromkeys(run.summary.monitor for run in runs if run.summary.monitor)
    names = dict.fromkeys(name for run in runs for name in run.summary.metrics if "/" not in name)
    return list(dict.fromkeys([*(name for name in monitors if name in names), *names]))[:20]


def _measured(runs: Sequence[RunHistory]) -> list[ComparedValue]:
    """Return metrics and times, without those that no run has."""
    monitors = {run.summary.monitor for run in runs}
    best = f"best {metric_name(next(iter(monitors)))}".strip() if len(monitors) == 1 else "best"

    def metric(name: str, value: float | None) -> str:
        return MISSING if value is None else metric_value(name, value)

    def took(run: RunHistory) -> str:
        # The wall-clock time of a complete run leaves out earlier commands. `training` includes them.
        kinds = [event.kind for event in run.events]
        is_resumed = (
            run.summary.state == "done" and kinds.count("start") - kinds.count("restart") > 1
        )
        return seconds(run.summary.took_s) + (" since the resume" if is_resumed else "")

    def seconds(value: float | None) -> str:
        return MISSING if value is None else duration(value)

    def share(run: RunHistory) -> str:
        training = run.seconds.get("training", 0.0)
        waited = run.seconds.get("data_wait")
        return (
            MISSING if not training or waited is None else format_share(min(waited / training, 1.0))
        )

    def row(section: str, name: str, text: Callable[[RunHistory], str]) -> ComparedValue:
        return ComparedValue(section, name, tuple(map(text, runs)))

    rows = [
        ComparedValue(
            "metrics",
            metric_name(name),
            tuple(metric(name, run.summary.metrics.get(name)) for run in runs),
        )
        for name in metric_names(runs)
    ]
    rows += [
        row("metrics", best, lambda run: metric(run.summary.monitor, run.summary.best)),
        row(
            "metrics",
            "training loss",
            lambda run: metric("loss", run.curves.get("train", "loss").last),
        ),
        row("time", "steps", lambda run: f"{run.summary.step:,}"),
        row("time", "took", took),
        row("time", "training", lambda run: seconds(run.training_s)),
        row("time", "waiting for data", share),
        row(
            "time",
            "samples per second",
            lambda run: MISSING if run.speed is None else f"{run.speed:,.0f}",
        ),
        row(
            "time",
            "processes",
            lambda run: f"{run.summary.procs:,}" if run.summary.procs else MISSING,
        ),
    ]
    return [row for row in rows if set(row.values) != {MISSING}]


def _differing(section: str, values: Sequence[dict[str, str]]) -> list[ComparedValue]:
    names = dict.fromkeys(name for each in values for name in each)
    rows = [
        ComparedValue(section, name, tuple(each.get(name, MISSING) for each in values))
        for name in names
    ]
    return [row for row in rows if not row.is_equal]


def is_sample(name: str) -> bool:
    """Return whether a digest in a record is that of a single sample."""
    return _SAMPLE.fullmatch(name) is not None


def _without_samples(
    runs: Sequence[RunHistory], rows: Sequence[ComparedValue]
) -> list[ComparedValue]:
    """Leave out hashes of single samples, except for the first one that two runs with one seed read differently."""
    seeds = [run.summary.settings.get("seed") for run in runs]

    def differs(row: ComparedValue) -> bool:
        pairs = {pair for pair in zip(seeds, row.values, strict=True) if pair[1] != MISSING}
        return len(pairs) > len({seed for seed, _ in pairs})

    first = next((row for row in rows if is_sample(row.name) and differs(row)), None)
    return [row for row in rows if row is first or not is_sample(row.name)]


# The console output of `samebits compare`.


_MIN_VALUE = 14
_MAX_VALUE = 44
_MAX_NAME = 28
_GAP = 2


def comparison_tables(comparison: Comparison, width: int) -> list[Table | Text]:
    """Lay out a comparison: a table for each group of runs that fits side by side."""
    names = max((len(one_line(row.name)) for row in comparison.rows), default=0) + 2
    first = min(max(names, 12), _MAX_NAME)
    num_fit = max(1, (width - first) // (_MIN_VALUE + _GAP))
    blocks: list[Table | Text] = []
    for start in range(0, len(comparison.runs), num_fit):
        if blocks:
            blocks.append(Text())
        shown = range(start, min(start + num_fit, len(comparison.runs)))
        value_width = min(_MAX_VALUE, (width - first) // len(shown) - _GAP)
        blocks.append(_table(comparison, shown, (first, value_width)))
    if groups := group_by_setting([run.summary for run in comparison.runs]):
        blocks += [Text(), Text(TITLE, "bold"), seed_table(groups, width)]
    return blocks


def _table(comparison: Comparison, shown: Sequence[int], widths: tuple[int, int]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(no_wrap=True, width=widths[0])
    for _ in shown:
        table.add_column(overflow="fold", width=widths[1])
    heads = [
        cut(f"{comparison.letters[index]} {one_line(comparison.runs[index].name)}", widths[1])
        for index in shown
    ]
    table.add_row("", *(Text(head, "bold") for head in heads))
    for section in SECTIONS:
        rows = comparison.section(section)
        if section == "settings":
            same = f"{comparison.num_equal} equal" + ("" if rows else ", none differ")
            table.add_row(Text("settings", "bold"), Text(same, "dim"))
        elif rows:
            table.add_row(Text(section, "bold"))
        for row in rows:
            values = []
            for index in shown:
                is_other = not row.is_equal and row.values[index] != row.values[0]
                style = (
                    STYLES.get(row.values[index], "")
                    if row.name == "state"
                    else "yellow"
                    if is_other
                    else ""
                )
                values.append(Text(one_line(row.values[index])[:400], style))
            table.add_row(Text(cut(f"  {one_line(row.name)}", widths[0])), *values)
    return table
