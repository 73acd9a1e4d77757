"""Separate the successive worlds of a job on one store, as torchrun's agent keeps a single store for all of them.

When only the membership changes, torchrun sets no variable that distinguishes one world from the next. Each process
therefore registers its arrival, and rank 0 admits all arrivals into a new generation:

    every process   add("arrivals", 1) -> this process's arrival number
    rank 0          add("generations", 1), put("generation", [number, num_arrivals]), again after each arrival
    other ranks     poll "generation" until num_arrivals covers their own arrival

Processes of an earlier generation have ended, so they never read the new number.
"""

import time
from typing import Any

from samebits.cluster.env import RankAssignment
from samebits.cluster.signed import SignedStore
from samebits.errors import LaunchError

# The other ranks give up this much later than rank 0: its error names the missing rank, so it must be the one shown.
SLACK_S = 3.0


class Generations:
    """The generation of this process: one world of the job. It has `timeout_s` from `start`, by `time.monotonic`."""

    def __init__(self, assignment: RankAssignment, store: SignedStore, start: float, timeout_s: float) -> None:
        self._rank, self._store, self._end, self._timeout_s = assignment.rank, store, start + timeout_s, timeout_s
        self._arrival = store.store.add("arrivals", 1)
        self._num_admitted = 0
        self._generation = 0

    def find_generation(self) -> int:
        """Return the number of this process's generation, from 1; ranks other than 0 wait for rank 0.

        Raises:
            LaunchError: Rank 0 has not joined within the timeout.
        """
        if self._rank == 0:
            self._generation = self._store.store.add("generations", 1)
            self.announce()
            return self._generation
        while (number := generation_of(self._store.get("generation"), self._arrival)) is None:
            if time.monotonic() > self._end + SLACK_S:
                raise LaunchError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank 0, which did not join",
                    where="cluster.join_timeout_s",
                    fix="Start rank 0, or read its output to see why it ended.",
                )
            time.sleep(0.01)
        return number

    def announce(self) -> None:
        """Admit the processes that have arrived since the last call. Only rank 0 calls this."""
        # Adding 0 reads the counter, where `get` would wait for a key that does not exist.
        num_arrivals = self._store.store.add("arrivals", 0)
        if num_arrivals != self._num_admitted:
            self._store.put("generation", [self._generation, num_arrivals])
            self._num_admitted = num_arrivals


def generation_of(announced: Any, arrival: int) -> int | None:
    """Return the generation that admits an arrival number; None if it is not admitted or the value is malformed."""
    if not isinstance(announced, list) or [type(item) for item in announced] != [int, int]:
        return None
    generation, num_arrivals = announced
    return generation if num_arrivals >= arrival else None
