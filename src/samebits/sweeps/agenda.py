"""Which parts of a grid can start now, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from samebits.sweeps.prefixes import Part
from samebits.sweeps.state_file import Sweep


class Agenda(Protocol):
    """The parts of a sweep that are to be trained."""

    @property
    def num_done(self) -> int:
        """Number of trials that have ended."""

    def candidates(self) -> Iterator[Part]:
        """Yield the parts that can start now, the most urgent one first."""

    def started(self, part: Part) -> None:
        """Note that a part is being trained."""

    def is_pruned(self, part: Part) -> bool:
        """Return whether a part that is being trained is to be stopped for good."""

    def ended(self, part: Part) -> None:
        """Note that a part is complete, or was pruned."""

    def failed(self, part: Part, reason: str) -> None:
        """Note that a part failed."""

    def interrupted(self, part: Part) -> None:
        """Note that a part stopped and can be resumed."""


class Grid:
    """The parts of a grid.

    Args:
        sweep: The sweep.
        folder: Its folder.
        has_reached: Whether a prefix has all of its steps.

    Attributes:
        parts: All parts.
        reasons: Why parts failed, by name.
    """

    def __init__(self, sweep: Sweep, folder: Path, has_reached: Callable[[Part], bool]) -> None:
        self.parts = sweep.parts()
        self.reasons: dict[str, str] = {}
        complete = {part.name for part in self.parts if (folder / part.name / "result.json").exists()}
        # A prefix is needed only by parts that have not started.
        needed = {
            part.donor
            for part in reversed(self.parts)
            if part.name not in complete and not (folder / part.name / "config.yaml").exists()
        }
        self._done = complete | {
            part.name
            for part in self.parts
            if part.is_prefix and (part.name not in self._closure(needed) or has_reached(part))
        }
        self._running: set[str] = set()

    def _closure(self, needed: set[str | None]) -> set[str]:
        """Return the parts that are needed, with their own donors."""
        donors = {part.name: part.donor for part in self.parts}
        found: set[str] = set()
        left = [name for name in needed if name is not None]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += [each for each in [donors[name]] if each is not None]
        return found

    @property
    def num_done(self) -> int:
        """Number of trials that have ended."""
        return sum(not part.is_prefix and part.name in self._done for part in self.parts) + len(self.reasons)

    def candidates(self) -> Iterator[Part]:
        """Yield the parts that can start now, prefixes first."""
        for part in self.parts:
            if part.name in self._done or part.name in self._running or part.name in self.reasons:
                continue
            if part.donor is not None and part.donor in self.reasons:
                self.reasons[part.name] = f"{part.donor} failed: {self.reasons[part.donor]}"
            elif part.donor is None or part.donor in self._done:
                yield part

    def started(self, part: Part) -> None:
        """Note that a part is being trained."""
        self._running.add(part.name)

    def is_pruned(self, part: Part) -> bool:
        """Return False: a grid trains all of its trials."""
        return False

    def ended(self, part: Part) -> None:
        """Note that a part is complete."""
        self._running.discard(part.name)
        self._done.add(part.name)

    def failed(self, part: Part, reason: str) -> None:
        """Note that a part failed, and with it those that start from it."""
        self._running.discard(part.name)
        self.reasons[part.name] = reason

    def interrupted(self, part: Part) -> None:
        """Note that a part stopped and can be resumed."""
        self._running.discard(part.name)
