"""How long other processes have been silent, by this process's clock alone. Nothing here imports torch."""

import time
from collections.abc import Mapping


class Silence:
    """How long the counts that others write have stood still.

    Clocks of other machines are never compared: a count is new if it differs from the one before.

    Args:
        longest_look_s: What counts at most between two looks. After a longer pause this process was stopped or the link
            was down, so it does not know how long the others were silent.
    """

    def __init__(self, longest_look_s: float) -> None:
        self._longest_look_s = longest_look_s
        self._looked_at = time.monotonic()
        self._beats: dict[int, object] = {}
        self._silent_s: dict[int, float] = {}

    def look(self, beats: Mapping[int, object]) -> set[int]:
        """Take the present counts, None for one that is not there yet; return the others whose count has changed."""
        now = time.monotonic()
        passed_s = min(now - self._looked_at, self._longest_look_s)
        self._looked_at = now
        changed = set()
        for other, beat in beats.items():
            if beat is None or self._beats.get(other) == beat:
                self._silent_s[other] = self._silent_s.get(other, 0.0) + passed_s
                continue
            if other in self._beats:
                changed.add(other)
            self._silent_s[other] = 0.0
            self._beats[other] = beat
        return changed

    def of(self, other: int) -> float:
        """Return for how long the count of another one stood still at the last look, seconds."""
        return self._silent_s.get(other, 0.0)
