"""The trials of a sweep in rows, from their run folders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config import document
from samebits.errors import ConfigError
from samebits.run_views.files import read_object, text
from samebits.run_views.select import is_lower_better
from samebits.run_views.summary import RunSummary, read_summary
from samebits.sweeps.state_file import Sweep, settings_of, trial_name


@dataclass
class TrialRow:
    """A trial in one row."""

    number: int  #: Its number, from 0.
    summary: RunSummary  #: Its run.
    #: The settings in which it differs from others, as they were typed.
    values: dict[str, Any] = field(default_factory=dict)
    chain: str = ""  #: The last link of its record of steps; empty if it is not complete.

    def to_plain(self) -> dict[str, Any]:
        """Return the trial as plain JSON."""
        run = self.summary
        return {
            "trial": run.name,
            "state": run.state,
            "reason": run.reason,
            "settings": self.values,
            "step": run.step,
            "metrics": run.metrics,
            "best": run.best,
            "weights_sha256": run.weights_sha256,
            "chain": self.chain,
            "took_s": run.took_s,
        }


def read_trials(folder: Path, sweep: Sweep, reasons: Mapping[str, str] | None = None) -> list[TrialRow]:
    """Return the trials of a sweep, by number."""
    trials = []
    for number, overrides in enumerate(sweep.trials):
        run = folder / trial_name(number)
        typed = {name: _parsed(value) for name, value in settings_of(overrides).items()}
        if (run / "config.yaml").is_file():
            summary = read_summary(run)
            summary.settings = {**summary.settings, **typed}
        else:
            reason = (reasons or {}).get(run.name, "")
            summary = RunSummary(run, state="failed" if reason else "waiting", reason=reason, settings=dict(typed))
        summary.recipe = ""  # that of all trials
        outcome = sweep.outcomes.get(number)
        if outcome is not None and outcome.state == "pruned":
            summary.state, summary.reason = "pruned", ""
            summary.step = outcome.values[-1][0] if outcome.values else summary.step
            value = outcome.values[-1][1] if outcome.values else None
            # A SHA-256 has 64 digits; the file may be a stranger's.
            summary.metrics = {} if value is None else {sweep.metric: value}
        chain = text(read_object(run / "result.json").get("chain"))[:64]
        trials.append(TrialRow(number, summary, typed, chain))
    return trials


def ranked(trials: list[TrialRow], sweep: Sweep) -> list[TrialRow]:
    """Return the trials, best metric first; those without one are last."""
    metric = sweep.metric or next((trial.summary.monitor for trial in trials if trial.summary.monitor), "")
    is_low = sweep.better == "min" if sweep.metric else is_lower_better(metric)
    sign = 1.0 if is_low else -1.0
    rest = [trial for trial in trials if metric in trial.summary.metrics]
    last = [trial for trial in trials if metric not in trial.summary.metrics]
    return sorted(rest, key=lambda trial: (sign * trial.summary.metrics[metric], trial.number)) + last


def _parsed(value: str) -> Any:
    try:
        parsed = document.parse_value(value)
    except ConfigError:
        return value
    return parsed if isinstance(parsed, bool | int | float | str) or parsed is None else value
