"""Throughput of a run in samples per second."""

import time
from collections import deque
from collections.abc import Callable


class Rate:
    """Samples per second over the last `window_s` seconds of training, without evaluation and checkpoints."""

    def __init__(self, window_s: float = 10.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._window_s, self._clock, self._last = window_s, clock, clock()
        self._steps: deque[tuple[float, int]] = deque()
        self._seconds, self._num_samples = 0.0, 0

    def resume(self) -> None:
        """Continue after a pause: the time since the last step does not count."""
        self._last = self._clock()

    def add(self, num_samples: int) -> None:
        """Count a completed step of `num_samples` samples."""
        now = self._clock()
        self._steps.append((now - self._last, num_samples))
        self._seconds += now - self._last
        self._num_samples += num_samples
        self._last = now
        # One step stays, however long it is: a slow model has steps longer than the window.
        while len(self._steps) > 1 and self._seconds - self._steps[0][0] >= self._window_s:
            seconds, samples = self._steps.popleft()
            self._seconds -= seconds
            self._num_samples -= samples

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 before the first step."""
        return self._num_samples / self._seconds if self._seconds > 0 else 0.0

    def seconds_for(self, num_samples: int) -> float | None:
        """Return how long `num_samples` take at this rate, seconds; None before the first step."""
        return num_samples / self.samples_per_s if self.samples_per_s > 0 else None
