"""Ranks' own work in a step, and which of them holds the others up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW_S = 30.0
NUM_WINDOWS = 2  # in a row: others' work on a machine comes and goes
NOTABLE = 1.3
MOST_RANKS = 16  # that are written down one by one

Work = Sequence[tuple[float, int, int]]


class Stragglers:
    """Is told now and then how much own work each rank has done, and says what that means.

    Ranks may have unequal numbers of micro-batches, so they are compared by the time that one takes.
    """

    def __init__(self) -> None:
        self._last: Work = ()
        self._window: Work = ()
        self._window_began = 0.0
        self._slow_windows: dict[int, int] = {}
        self._said: set[int] = set()

    def step_ms(self, work: Work) -> dict[str, float]:
        """Own work of a step since the last call, in milliseconds; empty while not every rank has done new steps.

        Args:
            work: Of each rank, since the beginning: seconds of own work, steps and micro-batches that it was for.
        """
        if len(self._last) != len(work):
            self._last = work
            return {}
        pairs = list(zip(self._last, work, strict=True))
        if not pairs or not all(new[1] > old[1] for old, new in pairs):
            return {}
        self._last = work
        times = [1000 * (new[0] - old[0]) / (new[1] - old[1]) for old, new in pairs]
        figures = {"median_ms": statistics.median(times), "max_ms": max(times), "slowest": times.index(max(times))}
        return figures | (
            {f"rank_{rank}_ms": time for rank, time in enumerate(times)} if len(times) <= MOST_RANKS else {}
        )

    def notice(self, work: Work, now: float) -> str | None:
        """Somebody who is notably slower than the others and has been for a while, said once; else None.

        Args:
            work: As for `step_ms`.
            now: The time in seconds; only differences count.
        """
        if len(self._window) != len(work):
            self._window, self._window_began = work, now
            return None
        if now - self._window_began < WINDOW_S:
            return None
        times = {
            rank: (new[0] - old[0]) / (new[2] - old[2])
            for rank, (old, new) in enumerate(zip(self._window, work, strict=True))
            if new[2] > old[2]
        }
        self._window, self._window_began = work, now
        if len(times) < 2:
            return None
        slowest = max(times, key=lambda rank: times[rank])
        others = statistics.median(time for rank, time in times.items() if rank != slowest)
        if times[slowest] < NOTABLE * others:
            self._slow_windows = {}
            return None
        self._slow_windows = {slowest: self._slow_windows.get(slowest, 0) + 1}
        if self._slow_windows[slowest] < NUM_WINDOWS or slowest in self._said:
            return None
        self._said.add(slowest)
        return (
            f"rank {slowest} is slow: {1000 * times[slowest]:,.0f} ms of its own work for a micro-batch, the others "
            f"{1000 * others:,.0f} ms; all wait for it\n"
            "  likely  other work on its machine, a slower processor, or slower reading of its data"
        )
