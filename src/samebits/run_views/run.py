"""Make runs Python objects: `samebits.runs("runs")` and `samebits.Run`, also shown in notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from samebits.errors import printable
from samebits.extras import require
from samebits.plain_file import number
from samebits.provenance.run_files import RunFiles
from samebits.report.records import History
from samebits.run_views.summary import RunSummary, check_run, read_summaries, read_summary
from samebits.run_views.table import parse_condition, select

if TYPE_CHECKING:
    from pandas import DataFrame

_SHORT = 8  # hex digits of a hash that is shown


class Run:
    """A run, read from its folder; nothing in the folder is executed.

    Attributes:
        folder: The run folder.
    """

    def __init__(self, folder: Path, summary: RunSummary | None = None) -> None:
        self.folder = folder
        self._known = summary

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Load a run from its folder: complete, running, stopped or failed.

        Raises:
            CheckpointError: It is not a run folder.
        """
        path = Path(folder)
        check_run(path)
        return cls(path)

    @cached_property
    def summary(self) -> RunSummary:
        """The run in one row: recipe, steps, times and the settings by dotted name, as in `samebits runs --json`."""
        return self._known or read_summary(self.folder)

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.folder.absolute().name

    @property
    def state(self) -> str:
        """The state when it was read: "running", "stopped", "failed" or "done"."""
        return self.summary.state

    @property
    def settings(self) -> dict[str, Any]:
        """All settings by dotted name: `run.settings["optim.lr"]`."""
        return self.summary.settings

    @cached_property
    def result(self) -> dict[str, Any]:
        """The content of `result.json`; empty if the run is not complete."""
        return RunFiles(self.folder, is_tolerant=True).result

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last validation, by name."""
        found = self.result.get("metrics")
        if not isinstance(found, dict):
            return self.summary.metrics
        return {
            name: float("nan") if (value := number(given)) is None else value
            for name, given in found.items()
        }

    @property
    def weights_sha256(self) -> str:
        """SHA-256 of the final weights; empty if the run is not complete."""
        return self.summary.weights_sha256

    @cached_property
    def history(self) -> History:
        """Its losses and metrics, as lists or a pandas DataFrame."""
        return History(self.folder)

    def __repr__(self) -> str:
        summary = self.summary
        shown = [
            f"{name}={value:.4g}" for name, value in summary.metrics.items() if "/" not in name
        ][:6]
        if summary.state != "done":
            shown.insert(0, f"{summary.state} at step {summary.step:,}")
        if summary.weights_sha256:
            shown.append(f"weights_sha256='{summary.weights_sha256[:_SHORT]}…'")
        return printable(f"Run({', '.join([repr(str(self.folder)), *shown])})")

    def _repr_html_(self) -> str:
        """Show the run with its curves in a notebook."""
        from samebits.run_views.page.notebook import run_card

        return run_card(self.summary)


class RunList(Sequence[Run]):
    """Runs in the order of a table. A part, such as `runs[:3]`, is one too."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> RunList: ...

    def __getitem__(self, index: int | slice) -> Run | RunList:
        return RunList(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each run: its columns in the table, its metrics, and the settings in which runs differ."""
        settings = [run.settings for run in self._runs]
        names = dict.fromkeys(name for each in settings for name in each)
        differing = [name for name in names if len({repr(each.get(name)) for each in settings}) > 1]
        return [
            _row(run.summary) | {name: run.settings.get(name) for name in differing}
            for run in self._runs
        ]

    def frame(self) -> DataFrame:
        """Return `rows` as a pandas DataFrame.

        Raises:
            ConfigError: pandas is not installed.
        """
        require("notebook", "RunList.frame", "pandas")
        import pandas

        frame = pandas.DataFrame(self.rows())
        if len(frame):
            frame["started"] = pandas.to_datetime(frame["started"], unit="s", errors="coerce")
        return frame

    def __repr__(self) -> str:
        counts: dict[str, int] = {}
        for run in self._runs:
            counts[run.state] = counts.get(run.state, 0) + 1
        states = "".join(f", {count:,} {state}" for state, count in counts.items())
        return f"RunList({len(self._runs):,} runs{states})"

    def _repr_html_(self) -> str:
        """Show the runs as a table in a notebook."""
        from samebits.run_views.page.notebook import runs_card

        return runs_card([run.summary for run in self._runs])


def runs(
    folder: str | Path = "runs",
    where: str | Sequence[str] = (),
    sort: str | None = None,
    *,
    reverse: bool = False,
) -> RunList:
    """Return the runs in a folder and up to two levels below it, as `samebits runs` lists them.

    Args:
        folder: The folder.
        where: Conditions that a run meets, such as "optim.lr>0.1" or ["state=done", "top1>0.9"].
        sort: A column, a metric or a setting; metrics best first. None: by start.
        reverse: Whether the order is reversed.

    Raises:
        ConfigError: The folder cannot be read, a condition has another form, or no run has a value of that name.
    """
    conditions = [parse_condition(each) for each in ([where] if isinstance(where, str) else where)]
    found = select(read_summaries(Path(folder)), conditions, sort, is_reversed=reverse)
    return RunList([Run(summary.path, summary) for summary in found])


def _row(run: RunSummary) -> dict[str, Any]:
    return {
        "run": run.name,
        "recipe": run.recipe,
        "state": run.state,
        "step": run.step,
        "epoch": run.epoch,
        **run.metrics,
        "best": run.best,
        "train_loss": run.train_loss,
        "started": run.started,
        "took_s": run.took_s,
        "procs": run.procs,
        "weights_sha256": run.weights_sha256,
        "folder": str(run.path),
    }
