"""Graceful stop: from a signal in one process to a stop of all ranks after the same step."""

import time

from torch.distributed import DistError

from samebits.cluster.signals import StopSignal
from samebits.cluster.world import World
from samebits.engine.job import Job

STORE_KEY = "samebits/stop"
# A poll is a round trip to the store in the training thread, so it must be rare compared with short steps.
POLL_S = 0.5


class StopFlag:
    """The stop flag of a step; rank 0's value travels to all ranks with the gradients.

    A signal may reach any rank, and not all of them. A rank other than 0 writes the request to the store, which rank 0
    polls. So every rank reads one decision from the same all-reduce and stops after the same step.
    """

    def __init__(self, job: Job, stop: StopSignal) -> None:
        self._job, self._stop = job, stop
        self._reported_to: World | None = None
        self._polled_at = time.monotonic()

    def __call__(self) -> bool:
        """Return whether a stop was requested, as rank 0 sees it."""
        return self._is_requested(polls=self._job.world.is_main)

    def is_requested(self) -> bool:
        """Return whether a stop request is visible to this rank. For use between steps, without an all-reduce."""
        return self._is_requested(polls=True)

    def _is_requested(self, *, polls: bool) -> bool:
        world, store = self._job.world, self._job.world.signed
        try:
            if self._stop.requested:
                if store is not None and not world.is_main and self._reported_to is not world:
                    store.put(STORE_KEY, world.rank)
                    self._reported_to = world
            elif polls and store is not None and time.monotonic() - self._polled_at > POLL_S:
                self._polled_at = time.monotonic()
                return store.get(STORE_KEY) is not None
        except DistError:
            # The launcher serves the store of a world whose members change. Where it has ended, all stop by themselves.
            if world.membership is None:
                raise
        return self._stop.requested
