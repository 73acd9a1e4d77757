"""Divide a step's micro-batches by the measured speed of the ranks (`cluster.load_balancing`).

    rank 0 at an interval: flag BALANCE, with a step's gradients
    all ranks after that step: gather seconds per micro-batch since the last time
        the step would become notably shorter: divide the next steps by it, and open the loader again

All ranks compute the division from the same numbers. A new process group (`cluster.recovery=in_step`) starts evenly.
"""

import math
import time
from collections.abc import Iterator

from samebits.cluster import collectives
from samebits.data.division import Division, Times, divide, duration
from samebits.data.loader import Loader
from samebits.data.micro_batches import num_micro_batches
from samebits.data.order import Step
from samebits.engine.job import Job

INTERVAL_S = 2.0
MIN_STEPS = 4
NOTABLE = 0.9  # a step has to become shorter than this share of its time: opening the loader again costs time too


class LoadBalance:
    """Measures the ranks of a world, and divides the work."""

    def __init__(self, job: Job) -> None:
        size = job.world.size
        self._num_leaves = num_micro_batches(job.order.global_batch, job.order.micro_batch)
        # With fewer micro-batches than ranks, some ranks have none, and their speed is unknown.
        self._is_on = job.config.cluster.load_balancing and 1 < size <= self._num_leaves
        self._times: Times = (1.0,) * size
        self._begin(job)

    def _begin(self, job: Job) -> None:
        activity = job.world.activity
        self._began, self._first_step = time.monotonic(), job.progress.step
        self._before = activity.work_s, activity.num_micro_batches

    def is_due(self, job: Job) -> bool:
        """Return whether to measure after the next step; rank 0's answer counts."""
        if not self._is_on or job.progress.step + 1 - self._first_step < MIN_STEPS:
            return False
        return time.monotonic() - self._began >= INTERVAL_S

    def update(self, job: Job) -> str:
        """Measure all ranks, on all of them; return a text on a new division of the next steps, or "" if it stays."""
        activity = job.world.activity
        work_s, count = activity.work_s - self._before[0], activity.num_micro_batches - self._before[1]
        found = collectives.all_gather_object(job.world, work_s / count if count else 0.0)
        self._begin(job)
        times = tuple(map(float, found))
        if not all(0 < each < math.inf for each in times):
            return ""  # an epoch's last, small step alone
        shares = divide(self._num_leaves, times)
        if duration(shares, times) > NOTABLE * duration(divide(self._num_leaves, self._times), times):
            return ""
        self._times = times
        counts = ", ".join(str(last - first) for first, last in shares)
        return f"load balancing: micro-batches of rank 0, 1, ... are {counts} from step {job.progress.step + 1:,} on"

    def reopen(self, job: Job) -> tuple[Loader, Iterator[Step]]:
        """Open the run's loader again, with the steps in their new division."""
        before = job.loader
        assert before is not None
        # Workers have read ahead by amounts that differ between
        # ranks, so no common step could start the change (ADR 49).
        before.close()
        start, stop, division = job.progress.step, job.planned_stop, Division(times=self._times)
        loader, planned = job.open_loader(steps=job.order.steps(job.world, start=start, stop=stop, division=division))
        # These belong to the run: reports subtract an earlier
        # `waited_s`, and would get a negative time from a new loader.
        loader.waited_s, loader.num_to_keep, loader.kept = before.waited_s, before.num_to_keep, before.kept
        return loader, planned
