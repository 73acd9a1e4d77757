"""Roll call: every process says who it is before the process group starts, so that each start fault has a text."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lockstep.cluster.address import network
from lockstep.cluster.env import RankAssignment
from lockstep.cluster.generations import SLACK_S, Generations
from lockstep.cluster.signed import Seal, SignedStore
from lockstep.cluster.store import REPORT_EVERY_S, as_clock, command_for, open_store
from lockstep.errors import LaunchError
from lockstep.open_files import out_of_files
from lockstep.scratch import is_running

# How long rank 0 keeps its store open after a fault, for the others to read it.
LINGER_S = 8.0
# Of ranks, process ids and counts.
_LARGEST = 1 << 31
# How often a process looks whether a stranger has overwritten its info.
RANK_INFO_S = 1.0


@dataclass(frozen=True)
class RankInfo:
    """What a process says of itself at the roll call."""

    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    backend: str
    num_gpus: int
    restart: int = 0
    # Shows that an answer which holds this info was written for this very process, and is not an older one.
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    namespace: str = ""  # where its pid means something, see `stacks.namespace`
    # Equal for processes that reach each other over 127.0.0.1.
    network: str = field(default_factory=network)

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


def rendezvous(
    assignment: RankAssignment, mine: RankInfo, timeout_s: float, report: Callable[[str], None]
) -> tuple[SignedStore, list[RankInfo]]:
    """Wait until every process of the world has said who it is.

    Args:
        assignment: This process's place.
        mine: What it says of itself.
        timeout_s: How long to wait, from now, until all have come.
        say: Gets a text every few seconds while somebody is missing.

    Returns:
        The store, with a prefix of this run's own, and everybody's info by rank.

    Raises:
        LaunchError: Somebody is missing at the end, or two contradict each other; the same text for all.
    """
    start = time.monotonic()
    base = PrefixStore(f"lockstep/{assignment.run_id}", open_store(assignment, timeout_s, report))
    try:
        run = SignedStore(base, Seal(assignment.key, f"run {assignment.run_id}"))
        generations = Generations(assignment, run, start, timeout_s) if assignment.agent_store else None
        number = generations.find_generation() if generations is not None else 1
        is_ours = assignment.started_by == "lockstep"
        seal = Seal(assignment.key, f"world {assignment.run_id}/{assignment.restart if is_ours else 0}/{number}")
        store = SignedStore(PrefixStore(str(number), base), seal)
        # Who joins a job late does not know how often the others were started again.
        mine = dataclasses.replace(mine, restart=max(assignment.restart, number - 1))
        call = _Rendezvous(assignment, mine, store, start, timeout_s, report, generations)
        call.register()
        infos = call.wait()
        # From here on only messages of this very world count: rank 0's nonce is as new as the roll, and each rank has
        # found its own in that.
        return SignedStore(store.store, seal.within(infos[0].nonce)), infos
    except dist.DistError as error:
        raise LaunchError(
            f"rank {mine.rank} ({mine}) lost rank 0 while it waited for the others to join",
            given=assignment.init,
            cause=out_of_files() or "rank 0 has ended; its own words say why",
        ) from error


def goodbye(assignment: RankAssignment, store: SignedStore, timeout_s: float) -> None:
    """Say good-bye. Rank 0, where it serves the store, waits for the others to be done with it, and removes a file."""
    if assignment.agent_store:
        return
    # Who is gone already, with or without a good-bye, is not waited for here: the run is over.
    with suppress(dist.DistError):
        store.store.add("left", 1)
        end = time.monotonic() + timeout_s
        while assignment.rank == 0 and store.count("left") < assignment.world_size and time.monotonic() < end:
            time.sleep(0.005)
    parts = urlsplit(assignment.init)
    if assignment.rank == 0 and parts.scheme == "file":
        Path(parts.path).unlink(missing_ok=True)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0 1 3`, and at most sixteen of them."""
    shown = " ".join(str(rank) for rank in ranks[:16])
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}{more}"


@dataclass
class _Rendezvous:
    assignment: RankAssignment
    mine: RankInfo
    store: SignedStore
    start: float
    timeout_s: float
    report: Callable[[str], None]
    generations: Generations | None

    def register(self) -> None:
        mine, store = self.mine, self.store
        store.store.add("joined", 1)
        # Kept with the first who came, so that a wrong size shows even where ranks 0 to N-1 are all there.
        first = _rank_info(store.put_first("first", asdict(mine))) or mine
        if first.world_size != mine.world_size:
            self._refuse_stale(first)
            # By rank, not by who came first, so that one fault has one text.
            low, high = sorted((first, mine), key=lambda info: info.rank)
            self._fault(
                f"world sizes differ: rank {low.rank} was started with {low.world_size}, "
                f"rank {high.rank} with {high.world_size}",
                where=f"rank {low.rank}: {low}\nrank {high.rank}: {high}",
                fix="give all processes the same --world-size (or WORLD_SIZE)",
            )
        self._claim()

    def _claim(self) -> None:
        """Leave this process's info, and see that no other process has left one for the same rank."""
        name = f"info/{self.mine.rank}"
        other = _rank_info(self.store.put_first(name, asdict(self.mine)))
        if other is None:
            self.store.put(name, asdict(self.mine))
        elif other != self.mine:
            self._refuse_duplicate(other)

    def _refuse_duplicate(self, other: RankInfo) -> NoReturn:
        self._refuse_stale(other)
        self._fault(
            f"two processes have rank {self.mine.rank}",
            where=f"{other}\n{self.mine}",
            fix=f"give each process its own --rank (or RANK), 0 to {self.mine.world_size - 1}",
        )

    def wait(self) -> list[RankInfo]:
        rank, size, store = self.mine.rank, self.mine.world_size, self.store
        infos: dict[int, RankInfo] = {rank: self.mine}
        limit_s = self.timeout_s + (0 if rank == 0 else SLACK_S)
        next_report_s, next_claim, pause_s = REPORT_EVERY_S, RANK_INFO_S, 0.002
        while True:
            if rank == 0:
                if self.generations is not None:
                    self.generations.announce()
                if not self._find_missing(infos):
                    roll = [infos[other] for other in range(size)]
                    store.put("infos", [asdict(info) for info in roll])
                    return roll
            elif (found := _rank_infos(store.get("infos"), size)) is not None:
                if found[rank] != self.mine:
                    self._refuse_duplicate(found[rank])
                return found
            if (fault := _fault(store.get("fault"))) is not None:
                self._end(fault)
            waited = time.monotonic() - self.start
            if waited >= limit_s:
                self._give_up(self._find_missing(infos), waited)
            if waited >= next_report_s:
                next_report_s += REPORT_EVERY_S
                self._report(self._find_missing(infos), waited)
            if waited >= next_claim:
                next_claim = waited + RANK_INFO_S
                self._claim()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)

    def _find_missing(self, infos: dict[int, RankInfo]) -> list[int]:
        """Read the infos that have come since; the ranks that are missing."""
        for rank in range(self.mine.world_size):
            if (
                rank not in infos
                and (info := _rank_info(self.store.get(f"info/{rank}"))) is not None
                and info.rank == rank
            ):
                infos[rank] = info
        return [rank for rank in range(self.mine.world_size) if rank not in infos]

    def _report(self, missing: Sequence[int], waited: float) -> None:
        # Rank 0 speaks for all; the others only while it is missing itself.
        if self.mine.rank == 0 or 0 in missing:
            self.report(f"{self._state(missing)}, {waited:.0f} s\n{self._advice(missing, waited)}")

    def _state(self, missing: Sequence[int]) -> str:
        size = self.mine.world_size
        joined = [rank for rank in range(size) if rank not in set(missing)]
        verb = "has" if len(joined) == 1 else "have"
        return f"waiting for {size} processes: {len(joined)} {verb} joined ({ranks_text(joined)})"

    def _advice(self, missing: Sequence[int], waited: float) -> str:
        command = command_for(self.assignment, missing[0]) if missing else ""
        return (
            f"  missing {ranks_text(missing)}"
            + (f". On {'its' if len(missing) == 1 else 'the first one’s'} machine:  {command}" if command else "")
            + f"\n  giving up in {as_clock(self.timeout_s - waited)} (cluster.join_timeout_s)"
        )

    def _give_up(self, missing: Sequence[int], waited: float) -> NoReturn:
        self._fault(
            f"gave up {self._state(missing)}",
            missing=ranks_text(missing),
            where=f"after {waited:.0f} s (cluster.join_timeout_s)",
            cause=self.store.refusal_cause() or None,
            fix=command_for(self.assignment, missing[0]) if missing else None,
        )

    def _fault(self, what: str, **slots: object) -> NoReturn:
        error = LaunchError(what, **slots)
        self.store.put_first("fault", {"what": error.what, "slots": error.slots})
        self._end(error)

    def _end(self, error: LaunchError) -> NoReturn:
        store = self.store
        with suppress(dist.DistError):
            store.store.add("acknowledged", 1)
            serves = self.mine.rank == 0 and not self.assignment.agent_store
            end = time.monotonic() + LINGER_S
            # Counts processes and not ranks: there may be two of one rank.
            came = store.count("joined")
            while serves and store.count("acknowledged") < came and time.monotonic() < end:
                time.sleep(0.02)
        raise error

    def _refuse_stale(self, other: RankInfo) -> None:
        """A file that an earlier run left behind holds the infos of processes that are gone."""
        parts = urlsplit(self.assignment.init)
        if parts.scheme != "file":
            return
        if other.host != self.mine.host or is_running(other.pid):
            return
        self._fault(
            f"{parts.path} is left over from an earlier run",
            where=f"its rank {other.rank} was {other}, which is gone",
            fix=f"rm {parts.path}, or name another file in --init",
        )


def _rank_info(value: Any) -> RankInfo | None:
    """A info that was read from a store; None where it is none."""
    names = {"rank", "world_size", "num_gpus", "pid", "restart"}
    if not isinstance(value, dict) or value.keys() != {each.name for each in dataclasses.fields(RankInfo)}:
        return None
    if not all(type(item) is (int if name in names else str) for name, item in value.items()):
        return None
    if not all(0 <= value[name] <= _LARGEST for name in names):
        return None
    return RankInfo(**value)


def _rank_infos(value: Any, size: int) -> list[RankInfo] | None:
    infos = [_rank_info(item) for item in value] if isinstance(value, list) else []
    roll = [info for info in infos if info is not None]
    return roll if [info.rank for info in roll] == [*range(size)] else None


def _fault(value: Any) -> LaunchError | None:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("what"), str)
        or not isinstance(value.get("slots"), dict)
    ):
        return None
    return LaunchError(value["what"], **value["slots"])
