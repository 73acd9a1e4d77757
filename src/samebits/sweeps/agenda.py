"""Which trials of a grid can start now, and the outcome of the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from samebits.sweeps.state_file import Sweep, trial_name


class Agenda(Protocol):
    """The trials of a sweep that are to be trained, by number."""

    reasons: dict[str, str]  #: Why trials failed, by name of the run folder.

    @property
    def num_done(self) -> int:
        """Number of trials that have ended."""

    def candidates(self) -> Iterator[int]:
        """Yield the trials that can start now, in order."""

    def started(self, trial: int) -> None:
        """Note that a trial is being trained."""

    def is_pruned(self, trial: int) -> bool:
        """Return whether a trial that is being trained is to be stopped for good."""

    def ended(self, trial: int) -> None:
        """Note that a trial is complete, or was pruned."""

    def failed(self, trial: int, reason: str) -> None:
        """Note that a trial failed."""

    def interrupted(self, trial: int) -> None:
        """Note that a trial stopped and can be resumed."""


class Grid:
    """The trials of a grid."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self.reasons: dict[str, str] = {}  #: Why trials failed, by name of the run folder.
        self._numbers = range(len(sweep.trials))
        self._done = {number for number in self._numbers if (folder / trial_name(number) / "result.json").exists()}
        self._taken = set(self._done)  # done, failed, or being trained

    @property
    def num_done(self) -> int:
        """Number of trials that have ended."""
        return len(self._done) + len(self.reasons)

    def candidates(self) -> Iterator[int]:
        """Yield the trials that can start now, in order."""
        return (number for number in self._numbers if number not in self._taken)

    def started(self, trial: int) -> None:
        """Note that a trial is being trained."""
        self._taken.add(trial)

    def is_pruned(self, trial: int) -> bool:
        """Return False: a grid trains all of its trials to their end."""
        return False

    def ended(self, trial: int) -> None:
        """Note that a trial is complete."""
        self._done.add(trial)

    def failed(self, trial: int, reason: str) -> None:
        """Note that a trial failed."""
        self._taken.add(trial)
        self.reasons[trial_name(trial)] = reason

    def interrupted(self, trial: int) -> None:
        """Note that a trial stopped and can be resumed."""
        self._taken.discard(trial)
