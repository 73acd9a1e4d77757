"""Each rank's own work per step, and which rank slows the others down."""

import statistics
from collections.abc import Sequence

WINDOW_S = 30.0
NUM_WINDOWS = 2  # in a row: other load on a machine comes and goes
NOTABLE = 1.3
MOST_RANKS = 16  # recorded one by one

Work = Sequence[tuple[float, int, int]]


class Stragglers:
    """Finds slow ranks from the totals of each rank's own work.

    Ranks may have unequal numbers of micro-batches, so the time per micro-batch is compared.
    """

    def __init__(self) -> None:
        self._last: Work = ()
        self._window: Work = ()
        self._window_began = 0.0
        self._slow_windows: dict[int, int] = {}
        self._said: set[int] = set()

    def step_ms(self, work: Work) -> dict[str, float]:
        """Return own work per step since the last call, in milliseconds; empty until every rank has new steps.

        `work` has for each rank, since its start, seconds of own work, steps and micro-batches.
        """
        if len(self._last) != len(work):
            self._last = work
            return {}
        pairs = list(zip(self._last, work, strict=True))
        # A rank without a new step has no time per step. The next record then covers a longer interval.
        if not pairs or not all(new[1] > old[1] for old, new in pairs):
            return {}
        self._last = work
        times = [1000 * (new[0] - old[0]) / (new[1] - old[1]) for old, new in pairs]
        values = {"median_ms": statistics.median(times), "max_ms": max(times), "slowest": times.index(max(times))}
        return values | (
            {f"rank_{rank}_ms": time for rank, time in enumerate(times)} if len(times) <= MOST_RANKS else {}
        )

    def notice(self, work: Work, now: float) -> str | None:
        """Return a notice, once per rank, on a rank that stays notably slower than the others by now; else None."""
        if len(self._window) != len(work):
            self._window, self._window_began = work, now
            return None
        # Reported per window and not per record: records may be many a second, and one of them shows noise.
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
        # Without the slowest rank, which in a world of two would be half of the median.
        others = statistics.median(time for rank, time in times.items() if rank != slowest)
        if times[slowest] < NOTABLE * others:
            self._slow_windows = {}
            return None
        # Only the slowest rank keeps its count, so windows that alternate between two ranks blame neither.
        self._slow_windows = {slowest: self._slow_windows.get(slowest, 0) + 1}
        if self._slow_windows[slowest] < NUM_WINDOWS or slowest in self._said:
            return None
        self._said.add(slowest)
        return (
            f"rank {slowest} is slow: a micro-batch takes {1000 * times[slowest]:,.0f} ms there and "
            f"{1000 * others:,.0f} ms on the other ranks, which wait for it\n"
            "  cause  other load on its machine, a slower processor, or slower loading of its data"
        )
