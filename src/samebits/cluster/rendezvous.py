"""Rendezvous: collect every rank's identity before the process group starts, so that start-up errors name ranks.

torch's process group waits for a missing rank in silence until its timeout. Here each rank writes its `RankInfo` into
the store, and rank 0 publishes the list once it is complete:

    rank r   add joined -> compare first (world size) -> put info/r ............... poll infos, fault -> return
    rank 0   the same                                  -> poll info/0 to info/N-1 -> put infos       -> return
    any      finds a contradiction, or the time is up  -> put fault; all ranks raise it, and count in acknowledged

Other programs can write to the store, so values are signed and validated, and overwritten entries are restored.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore

from samebits.cluster.address import network
from samebits.cluster.env import RankAssignment, command_for
from samebits.cluster.signed import (
    Seal,
    SignedStore,
    count_and_linger,
    error_from_store,
    read_as,
)
from samebits.cluster.store import SLACK_S, Generations, open_store
from samebits.cluster.timeout import REPORT_EVERY_S, as_clock
from samebits.errors import LaunchError, to_json
from samebits.open_files import out_of_files

# How long rank 0 keeps serving the store after a fault, for the other ranks to read it.
LINGER_S = 8.0
# Largest valid rank, process id or count.
_LARGEST = 1 << 31
# How often a process checks that no other program has overwritten its entry.
RANK_INFO_S = 1.0


@dataclass(frozen=True)
class RankInfo:
    """Identity of one rank, as it writes it into the store."""

    rank: int
    world_size: int
    host: str
    pid: int
    device: str
    backend: str
    num_gpus: int
    restart: int = 0
    #: Random: a list that contains it was written for this process, and is not an older one.
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    namespace: str = ""  #: Scope in which its process id is valid, see `stacks.namespace`.
    #: Equal for processes that reach each other over 127.0.0.1.
    network: str = field(default_factory=network)
    machine: str = ""  #: Equal for the processes of one machine.

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


def rendezvous(
    assignment: RankAssignment, mine: RankInfo, timeout_s: float, report: Callable[[str], None]
) -> tuple[SignedStore, list[RankInfo]]:
    """Wait until every rank has joined; return the store, restricted to this world, and all identities by rank.

    Raises:
        LaunchError: Ranks are missing, or contradict each other; equal on all ranks.
    """
    start = time.monotonic()
    base = PrefixStore(f"samebits/{assignment.run_id}", open_store(assignment, timeout_s, report))
    try:
        run = SignedStore(base, Seal(assignment.key, f"run {assignment.run_id}"))
        generations = (
            Generations(assignment, run, start, timeout_s) if assignment.agent_store else None
        )
        number = generations.find_generation() if generations is not None else 1
        is_launched = assignment.started_by == "samebits"
        seal = Seal(
            assignment.key,
            f"world {assignment.run_id}/{assignment.restart if is_launched else 0}/{number}",
        )
        store = SignedStore(PrefixStore(str(number), base), seal)
        # A process that joins late does not know how often the others were restarted; the generation counts it.
        mine = dataclasses.replace(mine, restart=max(assignment.restart, number - 1))
        call = Rendezvous(assignment, mine, store, start, timeout_s, report, generations)
        call.register()
        infos = call.wait()
        # The seal now depends on rank 0's nonce, which is as new as the list that contains this rank's own nonce:
        # messages of earlier worlds are refused.
        return SignedStore(store.store, seal.within(infos[0].nonce)), infos
    except dist.DistError as error:
        raise LaunchError(
            f"rank {mine.rank} ({mine}) lost rank 0 while it waited for the others to join",
            given=assignment.init,
            cause=out_of_files() or "rank 0 has ended; its own output gives the reason",
            fix="Read the output of rank 0.",
        ) from error


def goodbye(assignment: RankAssignment, store: SignedStore, timeout_s: float) -> None:
    """Leave the rendezvous: rank 0 serves the store until the others have left, at most `timeout_s`."""
    if assignment.agent_store:
        return
    # A rank that has ended without leaving is not an error here: the run is complete.
    count_and_linger(store, "left", assignment.rank == 0, lambda: assignment.world_size, timeout_s)


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks for a text, at most sixteen: `rank 2`, `ranks 0 1 3`."""
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'' if len(ranks) == 1 else 's'} {' '.join(map(str, ranks[:16]))}{more}"


@dataclass
class Rendezvous:
    """One process's part in a rendezvous: first `register`, then `wait`."""

    assignment: RankAssignment
    mine: RankInfo
    store: SignedStore
    start: float
    timeout_s: float
    report: Callable[[str], None]
    generations: Generations | None

    def register(self) -> None:
        """Write this process's identity into the store."""
        mine = self.mine
        store = self.store
        store.store.add("joined", 1)
        # Compared with the first process that joined: a wrong size must show even if ranks 0 to N-1 all exist.
        first = _rank_info(store.put_first("first", asdict(mine))) or mine
        if first.world_size != mine.world_size:
            # Sorted by rank, so that one fault has one text on all ranks.
            low, high = sorted((first, mine), key=lambda info: info.rank)
            self._fault(
                f"world sizes differ: rank {low.rank} was started with {low.world_size}, "
                f"rank {high.rank} with {high.world_size}",
                where=f"rank {low.rank}: {low}\nrank {high.rank}: {high}",
                fix="Start all processes with the same --world-size (or WORLD_SIZE).",
            )
        self._claim()

    def _claim(self) -> None:
        """Write this process's entry, and verify that no other process has claimed the rank."""
        name = f"info/{self.mine.rank}"
        other = _rank_info(self.store.put_first(name, asdict(self.mine)))
        if other is None:
            self.store.put(name, asdict(self.mine))
        elif other != self.mine:
            self._refuse_duplicate(other)

    def _refuse_duplicate(self, other: RankInfo) -> NoReturn:
        self._fault(
            f"two processes have rank {self.mine.rank}",
            where=f"{other}\n{self.mine}",
            fix=f"Give each process its own --rank (or RANK), 0 to {self.mine.world_size - 1}.",
        )

    def wait(self) -> list[RankInfo]:
        """Wait for all ranks, and return their identities."""
        rank = self.mine.rank
        size = self.mine.world_size
        store = self.store
        infos = {rank: self.mine}
        names = [f"info/{other}" for other in range(size)]
        limit_s = self.timeout_s + (0 if rank == 0 else SLACK_S)
        next_report_s = REPORT_EVERY_S
        next_claim = RANK_INFO_S
        pause_s = 0.002
        while True:
            if rank == 0:
                if self.generations is not None:
                    self.generations.announce()
                # One call at each look, and one for each rank only when all are there.
                if store.store.check(names) and not self._find_missing(infos):
                    complete = [infos[other] for other in range(size)]
                    store.put("infos", [asdict(info) for info in complete])
                    return complete
            elif (found := _rank_infos(store.get("infos"), size)) is not None:
                if found[rank] != self.mine:
                    self._refuse_duplicate(found[rank])
                return found
            if (fault := error_from_store(store.get("fault"))) is not None:
                self._end(fault)
            waited = time.monotonic() - self.start
            if waited >= limit_s:
                self._give_up(self._find_missing(infos), waited)
            if waited >= next_report_s:
                next_report_s += REPORT_EVERY_S
                missing = self._find_missing(infos)
                # Rank 0 reports for all ranks; the others report only while rank 0 is missing.
                if rank == 0 or 0 in missing:
                    command = command_for(self.assignment, missing[0]) if missing else ""
                    its = "its" if len(missing) == 1 else "the first one’s"
                    self.report(
                        f"{self._state(missing)}, {waited:.0f} s\n  missing {ranks_text(missing)}"
                        + (f". On {its} machine:  {command}" if command else "")
                        + f"\n  giving up in {as_clock(self.timeout_s - waited)} (cluster.join_timeout_s)"
                    )
            if waited >= next_claim:
                next_claim = waited + RANK_INFO_S
                self._claim()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)

    def _find_missing(self, infos: dict[int, RankInfo]) -> list[int]:
        """Read the entries of ranks that have joined since, and return the ranks that are still missing."""
        missing = [rank for rank in range(self.mine.world_size) if rank not in infos]
        for rank in missing:
            info = _rank_info(self.store.get(f"info/{rank}"))
            if info is not None and info.rank == rank:
                infos[rank] = info
        return [rank for rank in missing if rank not in infos]

    def _state(self, missing: Sequence[int]) -> str:
        joined = sorted({*range(self.mine.world_size)}.difference(missing))
        verb = "has" if len(joined) == 1 else "have"
        return f"waiting for {self.mine.world_size} processes: {len(joined)} {verb} joined ({ranks_text(joined)})"

    def _give_up(self, missing: Sequence[int], waited: float) -> NoReturn:
        command = command_for(self.assignment, missing[0]) if missing else ""
        self._fault(
            f"gave up {self._state(missing)}",
            given=f"missing {ranks_text(missing)}",
            where=f"after {waited:.0f} s (cluster.join_timeout_s)",
            cause=self.store.refusal_cause()
            or "the missing processes were not started, or cannot reach the store",
            fix=f"Run on the machine of rank {missing[0]}: {command}"
            if command
            else "Start the missing processes.",
        )

    def _fault(
        self, what: str, *, where: str, fix: str, given: str = "", cause: str = ""
    ) -> NoReturn:
        error = LaunchError(what, given=given, where=where, cause=cause, fix=fix)
        self.store.put_first("fault", to_json(error))
        self._end(error)

    def _end(self, error: LaunchError) -> NoReturn:
        serves = self.mine.rank == 0 and not self.assignment.agent_store
        # Processes and not ranks, because two processes may have one rank.
        count_and_linger(
            self.store, "acknowledged", serves, lambda: self.store.count("joined"), LINGER_S
        )
        raise error


def _rank_info(value: Any) -> RankInfo | None:
    """Validate an entry that was read from the store; None if it is malformed."""
    return read_as(RankInfo, value, 0, _LARGEST)


def _rank_infos(value: Any, size: int) -> list[RankInfo] | None:
    infos = [_rank_info(item) for item in value] if isinstance(value, list) else []
    valid = [info for info in infos if info is not None]
    return valid if [info.rank for info in valid] == [*range(size)] else None
