"""The share of training time that waits for data, and advice where it is large."""

WINDOW_S = 20.0
NOTABLE = 0.2


class DataWait:
    """Measures data waiting from the training time and the waiting time of this process so far."""

    def __init__(self) -> None:
        self._last = self._window = (0.0, 0.0)
        self._said = False

    def start(self, seconds: float, waited_s: float) -> None:
        """Start or resume training at these totals."""
        # At a resume, training and waiting so far belong to another process: only differences from here on count.
        self._last = self._window = (seconds, waited_s)

    def share(self, seconds: float, waited_s: float) -> float:
        """Return the share of training time since the last call that waited for data."""
        share = _share(self._last, (seconds, waited_s))
        self._last = (seconds, waited_s)
        return share

    def notice(self, seconds: float, waited_s: float, advice: str) -> str | None:
        """Return a notice with `advice`, once, if data was the bottleneck over a window of these totals; else None."""
        now = (seconds, waited_s)
        if self._said or seconds - self._window[0] < WINDOW_S:
            return None
        share = _share(self._window, now)
        self._window = now
        if share < NOTABLE:
            return None
        self._said = True
        return f"data loading is the bottleneck: {share:.1%} of training time waits for it\n  fix  {advice}"


def advice(*, num_workers: int, num_free_cores: int, can_cache: bool) -> str:
    """Return what to do when data loading is the bottleneck; `can_cache`: the recipe has a cache that is not used."""
    ways = []
    if num_free_cores > num_workers:
        now = "now 0: loading in the training process" if num_workers == 0 else f"now {num_workers}"
        free = "1 core is" if num_free_cores == 1 else f"{num_free_cores} cores are"
        ways.append(f"Set loader.num_workers={num_free_cores} ({now}; {free} free per rank).")
    if can_cache:
        ways.append("Set data.cache=FOLDER to keep decoded images from the second epoch on.")
    if not ways:
        ways.append("All cores are in use: take smaller images, faster disks or more machines.")
    return "\n       ".join(ways)


def _share(before: tuple[float, float], now: tuple[float, float]) -> float:
    seconds, waited_s = now[0] - before[0], now[1] - before[1]
    # Clamped: the two totals are read at slightly different times, so a short interval may give a share above 1.
    return min(max(waited_s / seconds, 0.0), 1.0) if seconds > 0 else 0.0
