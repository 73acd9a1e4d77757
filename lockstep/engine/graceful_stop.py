"""From a signal in one process to a stop of all after the same step."""

from __future__ import annotations

import time

from lockstep.cluster.signals import StopSignal
from lockstep.cluster.world import World

STORE_KEY = "lockstep/stop"
POLL_S = 0.5


class StopFlag:
    """Called before each step's sum is finished; rank 0's answer travels with the gradients.

    A signal may reach any rank, and not all. Another rank than 0 leaves word in the store, where rank 0 looks now and
    then.
    """

    def __init__(self, world: World, stop: StopSignal) -> None:
        self._world, self._stop = world, stop
        self._said = False
        self._looked_at = time.monotonic()

    def __call__(self) -> float:
        """1.0 on rank 0 once the run is asked to stop."""
        return float(self._is_asked(self._world.is_main))

    def is_asked(self) -> bool:
        """Whether the run is asked to stop, as far as this rank knows: between steps, where nothing travels."""
        return self._is_asked(True)

    def _is_asked(self, looks: bool) -> bool:
        store = self._world.signed
        if self._stop.requested:
            if store is not None and not self._world.is_main and not self._said:
                store.put(STORE_KEY, self._world.rank)
                self._said = True
            return True
        if looks and store is not None and time.monotonic() - self._looked_at > POLL_S:
            self._looked_at = time.monotonic()
            return store.get(STORE_KEY) is not None
        return False
