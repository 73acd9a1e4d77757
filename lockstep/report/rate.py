"""How fast a run goes: samples a second over the last while."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Rate:
    """Samples a second over the last seconds of training, without what lies between (evaluation, checkpoints).

    Args:
        window_s: Over how many of the last seconds the rate is taken.
        clock: Gives the time in seconds; only differences count.
    """

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._window_s = window_s
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds = 0.0
        self._num_samples = 0
        self._last = clock()

    def resume(self) -> None:
        """Training goes on: what passed since the last step doesn't count."""
        self._last = self._clock()

    def add(self, num_samples: int) -> None:
        """A step is done that took in so many samples."""
        now = self._clock()
        self._steps.append((now - self._last, num_samples))
        self._seconds += now - self._last
        self._num_samples += num_samples
        self._last = now
        while len(self._steps) > 1 and self._seconds - self._steps[0][0] >= self._window_s:
            seconds, samples = self._steps.popleft()
            self._seconds -= seconds
            self._num_samples -= samples

    @property
    def samples_per_s(self) -> float:
        """Samples a second; 0 before the first step."""
        return self._num_samples / self._seconds if self._seconds > 0 else 0.0

    def seconds_for(self, num_samples: int) -> float | None:
        """How long so many samples will take at this rate; None before the first step."""
        return num_samples / self.samples_per_s if self.samples_per_s > 0 else None
