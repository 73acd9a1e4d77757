"""Tells one world of a job from the next where one store serves them all, as torchrun's does."""

from __future__ import annotations

import time
from typing import Any

from lockstep.cluster.env import RankAssignment
from lockstep.cluster.signed import SignedStore
from lockstep.errors import LaunchError

# The others give up a little later than rank 0, so that its text, which knows who is missing, is the one shown.
SLACK_S = 3.0


class Generations:
    """Keeps the worlds of a job apart where one store serves them all, torchrun's.

    Nothing that torchrun says tells one world from the next when only the membership has changed. So each process
    takes a seat, and rank 0 invites all seats into a world of a new number; who sits in an old seat is gone.
    """

    def __init__(self, assignment: RankAssignment, store: SignedStore, start: float, timeout_s: float) -> None:
        self._rank, self._store, self._end, self._timeout_s = assignment.rank, store, start + timeout_s, timeout_s
        self._mine = store.store.add("seats", 1)
        self._num_invited = 0
        self._world = 0

    def find_world(self) -> int:
        """The number of this process's world, from 1."""
        if self._rank == 0:
            self._world = self._store.store.add("worlds", 1)
            self.invite()
            return self._world
        while (number := invited_to(self._store.get("invitation"), self._mine)) is None:
            if time.monotonic() > self._end + SLACK_S:
                raise LaunchError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank 0, which did not come",
                    where="cluster.join_timeout_s",
                )
            time.sleep(0.01)
        return number

    def invite(self) -> None:
        """Rank 0 asks in whoever has come since the last time."""
        num_seats = self._store.store.add("seats", 0)
        if num_seats != self._num_invited:
            self._store.put("invitation", [self._world, num_seats])
            self._num_invited = num_seats


def invited_to(invitation: Any, seat: int) -> int | None:
    """The world that a seat is invited to; None where it is not, or what was read is no invitation."""
    if not isinstance(invitation, list) or [type(item) for item in invitation] != [int, int]:
        return None
    world, num_seats = invitation
    return world if num_seats >= seat else None
