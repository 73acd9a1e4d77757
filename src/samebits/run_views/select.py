"""Which runs a table has, and in which order: `--where optim.lr>0.1`, `--sort top1`."""

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from samebits.config import document
from samebits.errors import ConfigError
from samebits.run_views.files import plain_text
from samebits.run_views.summary import RunSummary

# Longer operators first: the first match decides.
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {">=": ge, "<=": le, "!=": ne, ">": gt, "<": lt, "=": eq}
_CONDITION = re.compile(rf"\s*([^\s=<>!]+)\s*({'|'.join(_OPERATORS)})\s*(.*?)\s*", re.DOTALL)
_FIELDS: dict[str, Callable[[RunSummary], Any]] = {
    "run": lambda run: run.name,
    "recipe": lambda run: run.recipe or None,
    "state": lambda run: run.state,
    "step": lambda run: run.step,
    "epoch": lambda run: run.epoch,
    "best": lambda run: run.best,
    "train_loss": lambda run: run.train_loss,
    "started": lambda run: run.started,
    "took": lambda run: run.took_s,
    "procs": lambda run: run.procs or None,
    "sha256": lambda run: run.weights_sha256 or None,
}
_LOWER_IS_BETTER = re.compile(r"loss|error|distance|\b[cw]er\b", re.IGNORECASE)


@dataclass(frozen=True)
class Condition:
    """A condition on a run, such as optim.lr>0.1."""

    key: str  #: A column, a metric or a setting by dotted name.
    operator: str  #: =, !=, >, >=, < or <=.
    value: Any  #: The value to compare with.

    def is_met(self, run: RunSummary) -> bool:
        """Return whether a run meets it. A run without the value, or with one of another type, does not."""
        found, value = value_of(run, self.key), self.value
        if found is None and self.key not in run.settings:
            return False
        if self.key == "sha256" and self.operator == "=":
            return str(found).startswith(str(value))
        if _is_number(found) and _is_number(value):
            return _OPERATORS[self.operator](found, value)
        if self.operator in ("=", "!="):
            return _OPERATORS[self.operator](plain_text(found), plain_text(value))
        return isinstance(found, str) and isinstance(value, str) and _OPERATORS[self.operator](found, value)


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
                f"--where has the time {value!r}", allowed="2026-11-30 or 2026-11-30T09:30", fix="Give such a time."
            ) from None
    # The hash of a run may have digits only.
    return Condition(key, operator, value if key in ("sha256", "run") else document.parse_value(value))


def value_of(run: RunSummary, key: str) -> Any:
    """Return the value of a column, metric or setting; None if the run has none."""
    if key in _FIELDS:
        return _FIELDS[key](run)
    return run.metrics.get(key, run.settings.get(key))


def select(
    runs: Sequence[RunSummary], conditions: Iterable[Condition], sort: str | None, *, is_reversed: bool = False
) -> list[RunSummary]:
    """Return the runs that meet all conditions, in order.

    Args:
        sort: A column, metric or setting; None: by start. Metrics are sorted best first.
        is_reversed: Whether the order is reversed. Runs without the value are last either way.

    Raises:
        ConfigError: No run has a value of a condition or of `sort`.
    """
    conditions = list(conditions)
    known = dict.fromkeys([*_FIELDS, *(name for run in runs for name in (*run.metrics, *run.settings))])
    for key in (*(condition.key for condition in conditions), *([sort] if sort else [])):
        if runs and key not in known:
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


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    return _LOWER_IS_BETTER.search(metric) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sortable(value: Any) -> tuple[bool, Any]:
    return (False, float(value)) if _is_number(value) else (True, plain_text(value))
