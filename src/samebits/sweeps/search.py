"""A search with Optuna: which settings the next trial has, and which trials are stopped early.

Optuna runs in this process only, never in a rank: ranks receive settings, as in any run. Its own storage is not used: a
study is built from `sweep.json` for each question, so nothing else has to be kept, and a killed search continues as if
it had not been.

A trial's settings and its pruning follow from the trials up to `lag` before it, and from a seed of its own. Which of
the trials side by side ends first has no influence, so a search has the same trials each time, as its runs are exact.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.errors import ConfigError
from samebits.report.records import read_records
from samebits.run_views.files import read_object, text
from samebits.sweeps.state_file import (
    Axis,
    SearchInterval,
    SearchSpec,
    Sweep,
    TrialOutcome,
    parse_space,
    trial_name,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial

_STEPS_MOST = 10_000  # evaluations of a trial
# settings and outcome of each trial that another one follows from
Earlier = list[tuple[list[str], TrialOutcome]]
Values = list[tuple[int, float | None]]  # step and value of each evaluation


class Search:
    """The trials of a search, as an agenda for the runner. `sweep`: the sweep; its trials and outcomes are added."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        assert sweep.search is not None
        self._sweep = sweep
        self._folder = folder
        self._spec = sweep.search
        self._running: set[int] = set()
        self._judged: dict[int, int] = {}
        self.reasons: dict[str, str] = {
            trial_name(number): outcome.reason
            for number, outcome in sweep.outcomes.items()
            if outcome.state == "failed"
        }
        for number in range(
            len(sweep.trials)
        ):  # those that ended just before this process's predecessor was killed
            self._conclude(number)

    @property
    def num_done(self) -> int:
        """Number of trials that have ended."""
        return len(self._sweep.outcomes)

    def candidates(self) -> Iterator[int]:
        """Yield the trials that can start now, and choose the settings of new ones."""
        for number in range(self._spec.num_trials):
            if number in self._sweep.outcomes or number in self._running:
                continue
            if not all(
                earlier in self._sweep.outcomes for earlier in range(number - self._spec.lag + 1)
            ):
                return
            if number == len(self._sweep.trials):
                self._sweep.trials.append(
                    choose(self._spec, number, self._history(number), self._sweep.better)
                )
                # Before the trial starts: no run folder has settings that sweep.json lacks.
                self._sweep.write(self._folder)
            yield number

    def _history(self, number: int) -> Earlier:
        """Return settings and outcomes of the trials that a trial follows from."""
        return [
            (self._sweep.trials[earlier], self._sweep.outcomes[earlier])
            for earlier in range(number - self._spec.lag + 1)
        ]

    def started(self, trial: int) -> None:
        """Note that a trial is being trained."""
        self._running.add(trial)

    def is_pruned(self, trial: int) -> bool:
        """Return whether a trial that is being trained is to be stopped, by its evaluations so far."""
        if trial in self._sweep.outcomes:
            return self._sweep.outcomes[trial].state == "pruned"
        if (
            not self._spec.prunes or not self._sweep.metric
        ):  # without a metric, no earlier trial is complete
            return False
        values = self._values(trial)
        if len(values) == self._judged.get(trial, 0):
            return False
        self._judged[trial] = len(values)
        history = self._history(trial)
        overrides = self._sweep.trials[trial]
        kept = until_pruned(self._spec, history, overrides, values, self._sweep.better)
        # The last evaluation of a run that is complete decides nothing.
        if kept is None or (kept == len(values) and self._is_complete(trial)):
            return False
        self._settle(trial, TrialOutcome("pruned", values[:kept]))
        return True

    def ended(self, trial: int) -> None:
        """Note that a trial is complete, or was pruned."""
        self._running.discard(trial)
        self._conclude(trial)

    def failed(self, trial: int, reason: str) -> None:
        """Note that a trial failed. Optuna ignores it from then on."""
        self._running.discard(trial)
        self.reasons[trial_name(trial)] = reason
        self._settle(trial, TrialOutcome("failed", [], reason[:300]))

    def interrupted(self, trial: int) -> None:
        """Note that a trial stopped and can be resumed."""
        self._running.discard(trial)

    def _conclude(self, number: int) -> None:
        """Record the outcome of a trial that is complete."""
        if number in self._sweep.outcomes or not self._is_complete(number):
            return
        if not self._sweep.metric:
            best = read_object(self._folder / trial_name(number) / "checkpoints" / "best.json")
            self._sweep.metric = text(best.get("metric"))
            self._sweep.better = "min" if best.get("better") == "min" else "max"
        if not self.is_pruned(number):
            self._settle(number, TrialOutcome("done", self._values(number)))

    def _settle(self, number: int, outcome: TrialOutcome) -> None:
        self._sweep.outcomes[number] = outcome
        self._sweep.write(self._folder)

    def _is_complete(self, number: int) -> bool:
        return (self._folder / trial_name(number) / "result.json").exists()

    def _values(self, number: int) -> Values:
        """Return step and value of each evaluation of a trial so far."""
        records = read_records(self._folder / trial_name(number), "eval")
        return [(record["step"], record.get(self._sweep.metric)) for record in records][
            :_STEPS_MOST
        ]


def choose(spec: SearchSpec, number: int, history: Earlier, better: str) -> list[str]:
    """Return the settings of a trial, as overrides."""
    # A trial's own seed: the state of a generator would depend on how often the search was resumed.
    # Four bytes of the hash, since the sampler takes a seed of 32 bits.
    seed = int.from_bytes(hashlib.sha256(f"{spec.seed} {number}".encode()).digest()[:4], "big")
    study = _study(spec, history, better, seed=seed)
    space = parse_space(spec.space)
    chosen = study.ask(_distributions(space)).params
    # repr: the same float is read again.
    texts = {key: value if isinstance(value, str) else repr(value) for key, value in chosen.items()}
    return [f"{each.key}={texts[each.key]}" for each in space]


def until_pruned(
    spec: SearchSpec, history: Earlier, overrides: Sequence[str], values: Values, better: str
) -> int | None:
    """Return after how many of its evaluations a trial is pruned; None if it is not."""
    # Any seed: the settings are given, and the pruner draws no numbers.
    study = _study(spec, history, better, seed=0)
    space = parse_space(spec.space)
    study.enqueue_trial(_params(space, overrides))
    trial = study.ask(_distributions(space))
    for index, (step, value) in enumerate(values):
        trial.report(math.nan if value is None else value, step)
        if trial.should_prune():
            return index + 1
    return None


def _study(spec: SearchSpec, history: Earlier, better: str, *, seed: int) -> Study:
    # Late, since Optuna is an extra.
    import optuna

    # Otherwise it logs each study on the console.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize" if better == "max" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner() if spec.prunes else optuna.pruners.NopPruner(),
    )
    make: Callable[..., FrozenTrial] = optuna.trial.create_trial
    space = parse_space(spec.space)
    for overrides, outcome in history:
        values = {step: math.nan if value is None else value for step, value in outcome.values}
        last = outcome.values[-1][1] if outcome.values else None
        state = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}[outcome.state]
        # Optuna refuses a completed trial without a value.
        state = "FAIL" if state == "COMPLETE" and last is None else state
        study.add_trial(
            make(
                state=optuna.trial.TrialState[state],
                params=_params(space, overrides),
                distributions=_distributions(space),
                value=last if state == "COMPLETE" else None,
                intermediate_values=values,
            )
        )
    return study


def _distributions(space: Sequence[Axis | SearchInterval]) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for each in space:
        if isinstance(each, Axis):
            found[each.key] = CategoricalDistribution(each.values)
        elif each.is_whole:
            found[each.key] = IntDistribution(int(each.low), int(each.high), log=each.is_log)
        else:
            found[each.key] = FloatDistribution(each.low, each.high, log=each.is_log)
    return found


def _params(space: Sequence[Axis | SearchInterval], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a trial's settings as Optuna's parameters."""
    typed = dict(text.split("=", 1) for text in overrides)
    convert: dict[str, Callable[[str], Any]] = {
        each.key: str if isinstance(each, Axis) else int if each.is_whole else float
        for each in space
    }
    try:
        return {each.key: convert[each.key](typed[each.key]) for each in space}
    except (KeyError, ValueError):
        raise ConfigError(
            "sweep.json was altered: a trial has other settings than its search",
            fix="Restore the file.",
        ) from None
