"""Which steps trials have in common, and the runs that train them once.

Two trials have equal weights after step k if each of the steps before k does the same in both. Three kinds of settings
can differ without a change of those steps: the learning rate and its schedule, whose whole effect is the rate of each
step; the number of steps; and the rule of early stopping, which only decides when a run ends. So the rates of all steps
are computed and compared as floats. Trials that differ in any other setting differ from step 0.

    trials      rates of steps 0 to 99 equal, then three different ones
    runs        prefix-0001   0 ------- 100
                trial-0001               |------- 200      starts from a copy of the prefix's last checkpoint
                trial-0002               |------- 200
                trial-0003               |------- 200
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samebits.config.given import flat
from samebits.config.schema import RunConfig
from samebits.optim.schedule import factor
from samebits.provenance.same_run import plain_settings

# Settings whose whole effect on a step is its learning rate, or whether the run has that step.
OF_STEPS = frozenset(
    {
        "epochs", "max_steps", "optim.lr", "optim.lr_for_batch", "optim.schedule", "optim.warmup_epochs",
        "optim.final_factor", "optim.peak_at", "optim.start_factor", "optim.milestones", "optim.gamma",
        "stop_early.patience", "stop_early.min_delta", "stop_early.metric", "stop_early.better",
    }
)  # fmt: skip
# A prefix costs the start of a process, so it has to save this share of a trial's steps.
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Part:
    """A run of a sweep: a trial, or a prefix that several trials start from.

    Attributes:
        name: Name of its run folder.
        trial: Number of the trial whose settings it has.
        donor: Name of the part whose state it starts from; None: it starts from the seed.
        stop_after: Number of steps of a prefix; None for a trial.
    """

    name: str
    trial: int
    donor: str | None = None
    stop_after: int | None = None

    @property
    def is_prefix(self) -> bool:
        """Whether it is a prefix."""
        return self.stop_after is not None


def trial_name(number: int) -> str:
    """Return the name of a trial's run folder."""
    return f"trial-{number + 1:04}"


def group_key(config: RunConfig) -> str:
    """Return a text that is equal for trials that can have steps in common."""
    settings = {name: value for name, value in flat(plain_settings(config)).items() if name not in OF_STEPS}
    return json.dumps(settings, sort_keys=True, default=str)


def groups_of(configs: Sequence[RunConfig]) -> list[list[int]]:
    """Return the numbers of the trials that can have steps in common, for each group of two or more."""
    found: dict[str, list[int]] = {}
    for number, config in enumerate(configs):
        # In fast mode, equal steps need not have equal results; without a record, nothing shows that they are equal. An
        # outer step has several learning rates, and `learning_rates` has one of each step.
        if config.mode == "exact" and config.record.steps:
            found.setdefault(group_key(config), []).append(number)
    return [numbers for numbers in found.values() if len(numbers) > 1]


def learning_rates(config: RunConfig, steps_per_epoch: int) -> array[float]:
    """Return the learning rate of each step of a run, as `engine.step` computes it.

    Args:
        config: The settings.
        steps_per_epoch: Steps of one epoch.
    """
    num_steps = config.epochs * steps_per_epoch
    num_steps = num_steps if config.max_steps is None else min(num_steps, config.max_steps)
    peak, optim = config.peak_lr, config.optim
    return array("d", (peak * factor(step, num_steps, steps_per_epoch, optim) for step in range(num_steps)))


def plan(configs: Sequence[RunConfig], steps_per_epoch: Mapping[int, int]) -> list[Part]:
    """Return the runs of a sweep, each one after its donor.

    Args:
        configs: The settings of each trial.
        steps_per_epoch: Steps of one epoch by number of the trial, for the trials that may share steps.
    """
    rates = {number: learning_rates(configs[number], steps) for number, steps in steps_per_epoch.items()}
    planner = _Planner(configs, rates)
    for numbers in groups_of(configs):
        if all(number in rates for number in numbers):
            planner.add(numbers, 0, None)
    planned = {part.trial for part in planner.parts if not part.is_prefix}
    alone = [Part(trial_name(number), number) for number in range(len(configs)) if number not in planned]
    # Prefixes first: everything else waits for them, or can wait.
    ordered = sorted([*planner.parts, *alone], key=lambda part: (not part.is_prefix, part.trial))
    return _after_donors(ordered)


class _Planner:
    def __init__(self, configs: Sequence[RunConfig], rates: Mapping[int, array[float]]) -> None:
        self._configs, self._rates = configs, rates
        self.parts: list[Part] = []
        self._num_prefixes = 0

    def add(self, numbers: list[int], start: int, donor: str | None) -> None:
        """Plan trials whose steps before `start` are equal, and are trained by the donor if there is one.

        Args:
            numbers: The trials.
            start: Number of equal steps.
            donor: The part that has trained them, or some of them.
        """
        rates = self._rates
        shortest, longest = (choose(len(rates[number]) for number in numbers) for choose in (min, max))
        stop = start
        first = rates[numbers[0]]
        while stop < shortest and all(rates[number][stop] == first[stop] for number in numbers[1:]):
            stop += 1
        if len(numbers) == 1 or stop == longest:
            self._add_trials(numbers, donor)
            return
        if (stop - start) * (len(numbers) - 1) >= max(1, _LEAST_SHARE * longest):
            donor = self._add_prefix(max(numbers, key=lambda number: len(rates[number])), stop, donor)
        subsets: dict[float | None, list[int]] = {}
        for number in numbers:
            # A trial that ends here needs an evaluation that the others may not have, so it is a part of its own.
            rate = rates[number][stop] if stop < len(rates[number]) else None
            subsets.setdefault(rate, []).append(number)
        for subset in subsets.values():
            self.add(subset, stop, donor)

    def _add_prefix(self, trial: int, stop: int, donor: str | None) -> str:
        self._num_prefixes += 1
        name = f"prefix-{self._num_prefixes:04}"
        self.parts.append(Part(name, trial, donor, stop))
        return name

    def _add_trials(self, numbers: list[int], donor: str | None) -> None:
        """Plan trials with equal steps to their end: each one starts where the one before stopped."""

        def patience(number: int) -> float:
            value = self._configs[number].stop_early.patience
            return float("inf") if value is None else value

        for number in sorted(numbers, key=patience):
            self.parts.append(Part(trial_name(number), number, donor))
            donor = trial_name(number)


def _after_donors(parts: list[Part]) -> list[Part]:
    """Return parts in order, each one after its donor."""
    ordered: list[Part] = []
    done: set[str] = set()
    while parts:
        ready = [part for part in parts if part.donor is None or part.donor in done]
        ordered += ready
        done |= {part.name for part in ready}
        parts = [part for part in parts if part.name not in done]
    return ordered


def num_steps_of(parts: Sequence[Part], num_steps: Mapping[int, int]) -> tuple[int, int]:
    """Return how many steps the parts train in all, and how many the trials would train alone.

    Args:
        parts: The plan.
        num_steps: Steps of each trial by its number; trials that are not in it are left out.
    """
    starts = {part.name: part.stop_after for part in parts}
    trained = alone = 0
    for part in parts:
        if part.trial not in num_steps:
            continue
        end = num_steps[part.trial]
        start = (starts[part.donor] if starts[part.donor] is not None else end) if part.donor is not None else 0
        trained += (part.stop_after if part.stop_after is not None else end) - (start or 0)
        alone += 0 if part.is_prefix else end
    return trained, alone
