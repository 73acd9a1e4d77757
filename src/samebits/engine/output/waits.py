"""What the steps of a run wait for: samples, and slower ranks."""

import time
from collections.abc import Callable
from typing import Any

from samebits.cores import num_cores
from samebits.engine.job import Job
from samebits.report.bottleneck import DataWait, advice
from samebits.report.stragglers import Stragglers, Work


class Waits:
    """Measures the waits of a run, and reports each cause once."""

    def __init__(self, notify: Callable[[object], None]) -> None:
        self._notify = notify
        self._data, self._stragglers = DataWait(), Stragglers()
        #: Returns each rank's own work so far, on rank 0; see `HangDetector.work`.
        self.work_of_ranks: Callable[[], Work] = list

    def start(self, job: Job) -> None:
        """Start or resume training."""
        self._data.start(job.progress.seconds, job.progress.data_s)

    def data_share(self, job: Job) -> float:
        """Return the share of training time since the last call that waited for data."""
        return self._data.share(job.progress.seconds, job.progress.data_s)

    def step_ms(self) -> dict[str, float]:
        """Return the values of a record of the ranks' step times; empty for one rank. Reports a slow rank."""
        work = self.work_of_ranks()
        values = self._stragglers.step_ms(work)
        if text := self._stragglers.notice(work, time.monotonic()):
            self._notify(text)
        return values

    def notice_data(self, job: Job) -> None:
        """Report that data is the bottleneck, once."""
        data: Any = getattr(job.config, "data", None)
        what_to_do = advice(
            num_workers=job.loader.num_workers if job.loader is not None else 0,
            num_free_cores=num_cores() // job.world.num_ranks_here - 1,
            can_cache=hasattr(data, "cache") and data.cache is None,
        )
        if text := self._data.notice(job.progress.seconds, job.progress.data_s, what_to_do):
            self._notify(text)
