"""Roll call: every process says who it is before the process group starts, so that each start fault has a text."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from lockstep.cluster.env import Placement
from lockstep.cluster.meeting import SAY_EVERY_S, clock, command_for, open_store
from lockstep.errors import LaunchError
from lockstep.scratch import is_running

# How long rank 0 keeps its store open after a fault, for the others to read it.
LINGER_S = 8.0
# How long a process may take from claiming its rank to saying who it is.
CARD_S = 5.0
# The others give up a little later than rank 0, so that its text, which knows who is missing, is the one shown.
SLACK_S = 3.0


@dataclass(frozen=True)
class Card:
    """What a process says of itself at the roll call."""

    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    backend: str
    num_gpus: int
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


def hold(placement: Placement, mine: Card, timeout_s: float, say: Callable[[str], None]) -> tuple[Store, list[Card]]:
    """Wait until every process of the world has said who it is.

    Args:
        placement: This process's place.
        mine: What it says of itself.
        timeout_s: How long to wait, from now, until all have come.
        say: Gets a text every few seconds while somebody is missing.

    Returns:
        The store, with a prefix of this run's own, and everybody's card by rank.

    Raises:
        LaunchError: Somebody is missing at the end, or two contradict each other; the same text for all.
    """
    start = time.monotonic()
    base = PrefixStore(f"lockstep/{placement.run_id}", open_store(placement, timeout_s, say))
    try:
        seats = _Seats(placement, base, start, timeout_s) if placement.agent_store else None
        number = seats.find_world() if seats is not None else 1
        store = PrefixStore(str(number), base)
        # Who joins a job late does not know how often the others were started again.
        mine = dataclasses.replace(mine, restart=max(placement.restart, number - 1))
        call = _Call(placement, mine, store, start, timeout_s, say, seats)
        call.sign_in()
        return store, call.wait()
    except dist.DistError as error:
        raise LaunchError(
            f"rank {mine.rank} ({mine}) lost rank 0 while it waited for the others to join",
            given=placement.init,
            likely="rank 0 has ended; its own words say why",
        ) from error


def leave(placement: Placement, store: Store, timeout_s: float) -> None:
    """Say good-bye. Rank 0, where it serves the store, waits for the others to be done with it, and removes a file."""
    if placement.agent_store:
        return
    # Who is gone already, with or without a good-bye, is not waited for here: the run is over.
    with suppress(dist.DistError):
        store.add("left", 1)
        end = time.monotonic() + timeout_s
        while placement.rank == 0 and int(store.get("left")) < placement.world_size and time.monotonic() < end:
            time.sleep(0.005)
    parts = urlsplit(placement.init)
    if placement.rank == 0 and parts.scheme == "file":
        Path(parts.path).unlink(missing_ok=True)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 1 3`, and at most sixteen of them."""
    shown = " ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


class _Seats:
    """Keeps the worlds of a job apart where one store serves them all, torchrun's.

    Nothing that torchrun says tells one world from the next when only the membership has changed. So each process
    takes a seat, and rank 0 invites all seats into a world of a new number; who sits in an old seat is gone.
    """

    def __init__(self, placement: Placement, store: Store, start: float, timeout_s: float) -> None:
        self._rank, self._store, self._end, self._timeout_s = placement.rank, store, start + timeout_s, timeout_s
        self._mine = store.add("seats", 1)
        self._num_invited = 0
        self._world = 0

    def find_world(self) -> int:
        """The number of this process's world, from 1."""
        if self._rank == 0:
            self._world = self._store.add("worlds", 1)
            self.invite()
            return self._world
        key = f"invitation/{self._mine}"
        while not self._store.check([key]):
            if time.monotonic() > self._end + SLACK_S:
                raise LaunchError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank 0, which did not come",
                    where="cluster.join_timeout_s",
                )
            time.sleep(0.01)
        return int(self._store.get(key))

    def invite(self) -> None:
        """Rank 0 asks in whoever has come since the last time."""
        num_seats = self._store.add("seats", 0)
        for seat in range(self._num_invited + 1, num_seats + 1):
            self._store.set(f"invitation/{seat}", str(self._world))
        self._num_invited = num_seats


@dataclass
class _Call:
    placement: Placement
    mine: Card
    store: Store
    start: float
    timeout_s: float
    say: Callable[[str], None]
    seats: _Seats | None

    def sign_in(self) -> None:
        mine, store = self.mine, self.store
        store.add("came", 1)
        # Kept with the first who came, so that a wrong size shows even where ranks 0 to N-1 are all there.
        first = _card(store.compare_set("first", "", json.dumps(asdict(mine))))
        if first.world_size != mine.world_size:
            self._refuse_stale(first)
            # By rank, not by who came first, so that one fault has one text.
            low, high = sorted((first, mine), key=lambda card: card.rank)
            self._fault(
                f"world sizes differ: rank {low.rank} was started with {low.world_size}, "
                f"rank {high.rank} with {high.world_size}",
                where=f"rank {low.rank}: {low}\nrank {high.rank}: {high}",
                do="give all processes the same --world-size (or WORLD_SIZE)",
            )
        if store.add(f"claim/{mine.rank}", 1) > 1:
            other = self._read_card(mine.rank)
            self._refuse_stale(other)
            self._fault(
                f"two processes have rank {mine.rank}",
                where=f"{other or 'one that has not said who it is'}\n{mine}",
                do=f"give each process its own --rank (or RANK), 0 to {mine.world_size - 1}",
            )
        store.set(f"card/{mine.rank}", json.dumps(asdict(mine)))

    def wait(self) -> list[Card]:
        rank, size, store = self.mine.rank, self.mine.world_size, self.store
        missing = [other for other in range(size) if other != rank]
        limit_s = self.timeout_s + (0 if rank == 0 else SLACK_S)
        next_say, pause_s = SAY_EVERY_S, 0.002
        while True:
            if rank == 0:
                if self.seats is not None:
                    self.seats.invite()
                missing = self._absent(missing)
                if not missing:
                    cards = store.multi_get([f"card/{other}" for other in range(size)])
                    store.set("roll", json.dumps([json.loads(card) for card in cards]))
            if store.check(["roll"]):
                return [Card(**card) for card in json.loads(store.get("roll"))]
            if store.check(["fault"]):
                fault = json.loads(store.get("fault"))
                self._end(LaunchError(fault["what"], **fault["facts"]))
            waited = time.monotonic() - self.start
            if waited >= limit_s:
                self._give_up(self._absent(missing), waited)
            if waited >= next_say:
                next_say += SAY_EVERY_S
                self._say(self._absent(missing), waited)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([f"card/{rank}"])]

    def _say(self, missing: Sequence[int], waited: float) -> None:
        # Rank 0 speaks for all; the others only while it is missing itself.
        if self.mine.rank == 0 or 0 in missing:
            self.say(f"{self._state(missing)}, {waited:.0f} s\n{self._advice(missing, waited)}")

    def _state(self, missing: Sequence[int]) -> str:
        size = self.mine.world_size
        joined = [rank for rank in range(size) if rank not in set(missing)]
        verb = "has" if len(joined) == 1 else "have"
        return f"waiting for {size} processes: {len(joined)} {verb} joined ({ranks_text(joined)})"

    def _advice(self, missing: Sequence[int], waited: float) -> str:
        command = command_for(self.placement, missing[0]) if missing else ""
        return (
            f"  missing {ranks_text(missing)}"
            + (f". On {'its' if len(missing) == 1 else 'the first one’s'} machine:  {command}" if command else "")
            + f"\n  giving up in {clock(self.timeout_s - waited)} (cluster.join_timeout_s)"
        )

    def _give_up(self, missing: Sequence[int], waited: float) -> NoReturn:
        self._fault(
            f"gave up {self._state(missing)}",
            missing=ranks_text(missing),
            where=f"after {waited:.0f} s (cluster.join_timeout_s)",
            do=command_for(self.placement, missing[0]) if missing else None,
        )

    def _fault(self, what: str, **facts: object) -> NoReturn:
        error = LaunchError(what, **facts)
        self.store.compare_set("fault", "", json.dumps({"what": error.what, "facts": error.facts}))
        self._end(error)

    def _end(self, error: LaunchError) -> NoReturn:
        with suppress(dist.DistError):
            self.store.add("told", 1)
            serves = self.mine.rank == 0 and not self.placement.agent_store
            end = time.monotonic() + LINGER_S
            # Counts processes and not ranks: there may be two of one rank.
            came = int(self.store.get("came"))
            while serves and int(self.store.get("told")) < came and time.monotonic() < end:
                time.sleep(0.02)
        raise error

    def _read_card(self, rank: int) -> Card | None:
        end = time.monotonic() + CARD_S
        while time.monotonic() < end:
            if self.store.check([f"card/{rank}"]):
                return _card(self.store.get(f"card/{rank}"))
            time.sleep(0.02)
        return None

    def _refuse_stale(self, other: Card | None) -> None:
        """A file that an earlier run left behind holds the cards of processes that are gone."""
        parts = urlsplit(self.placement.init)
        if parts.scheme != "file":
            return
        if other is None or other.host != self.mine.host or is_running(other.pid):
            return
        self._fault(
            f"{parts.path} is left over from an earlier run",
            where=f"its rank {other.rank} was {other}, which is gone",
            do=f"rm {parts.path}, or name another file in --init",
        )


def _card(text: bytes) -> Card:
    return Card(**json.loads(text))
