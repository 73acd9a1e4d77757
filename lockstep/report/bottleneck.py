"""How much of the time of training waits for data, and what to do where that is much."""

from __future__ import annotations

WINDOW_S = 20.0
NOTABLE = 0.2


class DataWait:
    """Is told now and then how long training went on and waited so far; both of this process."""

    def __init__(self) -> None:
        self._last = self._window = (0.0, 0.0)
        self._said = False

    def begin(self, seconds: float, waited_s: float) -> None:
        """Training begins or goes on with so much behind it."""
        self._last = self._window = (seconds, waited_s)

    def share(self, seconds: float, waited_s: float) -> float:
        """Which share of the training time since the last call waited for data."""
        share = _share(self._last, (seconds, waited_s))
        self._last = (seconds, waited_s)
        return share

    def notice(self, seconds: float, waited_s: float, advice: str) -> str | None:
        """That data is the bottleneck, if it was for a while, and what to do; said once, else None."""
        now = (seconds, waited_s)
        if self._said or seconds - self._window[0] < WINDOW_S:
            return None
        share = _share(self._window, now)
        self._window = now
        if share < NOTABLE:
            return None
        self._said = True
        return f"data is the bottleneck: {share:.0%} of the training time waits for it\n  do  {advice}"


def advice(*, num_workers: int, num_free_cores: int, can_cache: bool) -> str:
    """What to do when data is the bottleneck.

    Args:
        num_workers: Reading processes that each rank has.
        num_free_cores: Cores of this machine for each rank, less the one that it computes on.
        can_cache: Whether the recipe has a cache (data.cache) that is not in use.
    """
    ways = []
    if num_free_cores > num_workers:
        now = "the rank reads by itself" if num_workers == 0 else f"now {num_workers}"
        free = "1 core is" if num_free_cores == 1 else f"{num_free_cores} cores are"
        ways.append(f"loader.num_workers={num_free_cores} ({now}; {free} free for each rank)")
    if can_cache:
        ways.append("data.cache=FOLDER keeps decoded pictures there, from the second epoch on")
    if not ways:
        ways.append("all cores are in use: fewer or smaller pictures, faster disks, or more machines")
    return "\n      ".join(ways)


def _share(before: tuple[float, float], now: tuple[float, float]) -> float:
    seconds, waited_s = now[0] - before[0], now[1] - before[1]
    return min(max(waited_s / seconds, 0.0), 1.0) if seconds > 0 else 0.0
