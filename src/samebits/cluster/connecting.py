"""Connect the process group under a deadline, and name the rank that keeps the others from connecting.

gloo and NCCL wait for a missing peer in native code, without a message, until the group's timeout. So the group starts
in a thread of its own, and a rank that is not connected after a second starts to report to the store and to watch:

    main thread     waits for the group, logs a line every 5 s, raises the verdict
    group thread    init_process_group -> connected: the main thread sets connect/done/RANK
    monitor thread  every second: sets connect/alive/RANK, checks its peers, reads or writes connect/verdict

A peer on this host is lost when its process has ended, one on another host when its connect/alive stops changing. The
first rank that finds a lost peer writes the verdict, and all ranks raise it, so one fault has one text everywhere.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import Store

from samebits.cluster import peer_errors, stacks
from samebits.cluster.rendezvous import RankInfo
from samebits.cluster.signed import SignedStore, peek
from samebits.cluster.timeout import REPORT_EVERY_S, call_with_timeout
from samebits.errors import LaunchError
from samebits.scratch import is_running

# Most groups connect before the monitor's first check, so a normal start pays only for an idle thread.
FIRST_LOOK_S = 1.0
PERIOD_S = 1.0
# A rank that has not reported for this long is named in the log; after SILENT_S it is lost.
QUIET_S = 3.0
SILENT_S = 15.0
# How long rank 0 keeps its store open after a verdict, for the others to read it.
LINGER_S = 3.0
# Even where the last rank joined late, connecting gets this long.
LEAST_S = 10.0
VERDICT = "connect/verdict"
_ALIVE, _DONE, _COUNT = "connect/alive", "connect/done", "connect/count"


def time_left(join_timeout_s: float, start: float) -> float:
    """Return how long connecting may take, seconds, if joining started at `start` by the monotonic clock."""
    return max(join_timeout_s - (time.monotonic() - start), min(join_timeout_s, LEAST_S))


def connect(
    start: Callable[[], object],
    rank: int,
    infos: Sequence[RankInfo],
    store: SignedStore,
    limit_s: float,
    report: Callable[[str], None],
    *,
    has_agent_store: bool = False,
) -> None:
    """Start the process group, and watch the other ranks meanwhile.

    Args:
        start: Starts the group; returns once this rank is connected to all others.
        rank, infos, store: This process's rank, all processes by rank, and the store that they share.
        limit_s, report: How long connecting may take; called with a text every few seconds meanwhile.
        has_agent_store: torchrun's agent serves the store; otherwise rank 0 does.

    Raises:
        LaunchError: A rank is lost, or the ranks can't reach each other.
    """
    with _Monitor(rank, infos, store, limit_s, report, has_agent_store) as monitor:
        try:
            call_with_timeout(start, limit_s, monitor.check)
            store.store.set(f"{_DONE}/{rank}", "1")
            store.store.add(_COUNT, 1)
        except (RuntimeError, ValueError, TimeoutError) as error:
            monitor.wait_for_verdict(error)


def wait_for_all(store: Store, size: int, limit_s: float) -> None:
    """Wait until all `size` ranks have connected: one that leaves earlier breaks the connections of the others."""
    end = time.monotonic() + limit_s
    with suppress(dist.DistError):  # rank 0 has ended: it had waited, so all have connected
        while store.add(_COUNT, 0) < size and time.monotonic() < end:
            time.sleep(0.005)


class _Monitor:
    """One rank's view of which ranks have connected; it has its own store client, as the group blocks the other."""

    def __init__(
        self,
        rank: int,
        infos: Sequence[RankInfo],
        store: SignedStore,
        limit_s: float,
        report: Callable[[str], None],
        has_agent_store: bool,
    ) -> None:
        self._rank, self._infos, self._store = rank, infos, store
        self._limit_s, self._report, self._has_agent_store = limit_s, report, has_agent_store
        # Each rank reads a key of every other one, so large worlds look less often.
        self._period_s = max(PERIOD_S, len(infos) / 256)
        self._reported: dict[int, bytes] = {}
        self._silent_s: dict[int, float] = {}
        self._alive: set[int] = set()  # have reported since this rank's group failed to start
        self._done: set[int] = set()
        self._is_lowest = False
        # Why the main thread waits for a verdict; TimeoutError: the limit has passed.
        self._failure: BaseException | None = None
        self._verdict: LaunchError | None = None
        self._ticked_at = time.monotonic()
        self._unanswered_s = 0.0
        self._next_say = REPORT_EVERY_S
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="connect-monitor", daemon=True)

    def __enter__(self) -> "_Monitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._wake.set()
        self._thread.join(1.0)

    def check(self, waited_s: float) -> None:
        """Log who has not connected, and raise the verdict once there is one. The main thread's tick.

        Raises:
            LaunchError: The verdict, or the store does not answer.
        """
        if self._verdict is not None:
            raise self._verdict
        now = time.monotonic()
        # Time in which this process was suspended does not count as waiting.
        self._unanswered_s += min(now - self._ticked_at, 1.0)
        self._ticked_at = now
        if self._unanswered_s > self._period_s + SILENT_S:
            raise self._lost_store(f"no answer for {self._unanswered_s:.0f} s")
        if waited_s >= self._next_say:
            self._next_say += REPORT_EVERY_S
            if self._is_lowest:
                quiet = [self._infos[other] for other in self._quiet()]
                missing = sorted([*self._not_done(), self._rank])
                self._report(peer_errors.still_waiting(self._infos, missing, waited_s, self._limit_s, quiet))

    def wait_for_verdict(self, failure: BaseException) -> NoReturn:
        """Raise the reason why this rank could not connect, once it is known which other ranks are alive."""
        # Reports from before the failure prove nothing: a dead peer may be the reason for it.
        self._alive.clear()
        self._failure = failure
        while True:
            self._wake.set()
            self.check(0.0)
            time.sleep(0.05)

    def _run(self) -> None:
        looked_at = time.monotonic()
        store = None
        pause_s = FIRST_LOOK_S
        while True:
            self._wake.wait(pause_s)
            if self._is_over:
                return
            self._wake.clear()
            now = time.monotonic()
            passed_s, looked_at, pause_s = min(now - looked_at, 2 * self._period_s), now, self._period_s
            try:
                store = store or self._store.clone()
                store.store.set(f"{_ALIVE}/{self._rank}", str(time.monotonic()))
                if (verdict := store.get(VERDICT)) is not None:
                    self._adopt(store.store, verdict)
                elif (ended := self._find_ended(store.store)) is not None:
                    self._decide(store, peer_errors.lost(self._infos[ended], "its process has ended"), num_lost=1)
                else:
                    self._judge(store, passed_s)
                if self._verdict is not None:
                    return
            except dist.DistError as error:
                self._verdict = self._lost_store(str(error).splitlines()[0])
                return
            self._unanswered_s = 0.0

    def _judge(self, signed: SignedStore, passed_s: float) -> None:
        """Find a silent rank; only the lowest rank that is alive and not connected does this, for all ranks."""
        store = signed.store
        for other in self._others():
            if self._is_done(store, other):
                continue
            report, before = peek(store, f"{_ALIVE}/{other}"), self._reported.get(other)
            if report is not None and report != before:
                self._silent_s[other], self._reported[other] = 0.0, report
                if before is not None:  # the first report may be old
                    self._alive.add(other)
            else:
                self._silent_s[other] = self._silent_s.get(other, 0.0) + passed_s
            if other < self._rank and not self._is_quiet(other) and self._failure is None:
                self._is_lowest = False
                return
        self._is_lowest = True
        silent = [other for other in self._not_done() if self._silent_s.get(other, 0.0) >= SILENT_S]
        if silent:
            reason = f"no sign of life for {SILENT_S:.0f} s"
            self._decide(signed, peer_errors.lost(self._infos[silent[0]], reason), num_lost=len(silent))
        elif isinstance(self._failure, TimeoutError):
            waiting, quiet = self._not_done(), self._quiet()
            if self._alive.issuperset(set(waiting).difference(quiet)):
                infos = [self._infos[other] for other in waiting]
                stopped = [info for info in infos if self._is_here(info) and stacks.is_stopped(info.pid)]
                lost = [self._infos[other] for other in quiet]
                error = peer_errors.gave_up(sorted([*waiting, self._rank]), self._limit_s, stopped, lost)
                self._decide(signed, error, num_lost=len(quiet))
        elif self._failure is not None and self._alive.issuperset(self._not_done()):
            mine = self._infos[self._rank]
            self._decide(signed, peer_errors.could_not_connect(mine, self._failure, signed.refusal_cause()), num_lost=0)

    def _others(self) -> list[int]:
        return [other for other in range(len(self._infos)) if other != self._rank]

    def _not_done(self) -> list[int]:
        return [other for other in self._others() if other not in self._done]

    def _is_done(self, store: Store, other: int) -> bool:
        if other not in self._done and store.check([f"{_DONE}/{other}"]):
            self._done.add(other)
        return other in self._done

    def _find_ended(self, store: Store) -> int | None:
        """Return a rank of this host whose process ended before it was connected."""
        for other in self._others():
            info = self._infos[other]
            # In this order: between the two checks a process may connect, do its work and end.
            has_ended = self._is_here(info) and not is_running(info.pid)
            if has_ended and (self._failure is not None or not self._is_done(store, other)):
                return other
        return None

    def _is_here(self, info: RankInfo) -> bool:
        """Return whether a rank's process id is valid in this process's scope: same host and container."""
        mine = self._infos[self._rank]
        return info.host == mine.host and info.namespace == mine.namespace != ""

    def _is_quiet(self, other: int) -> bool:
        return self._silent_s.get(other, 0.0) >= QUIET_S + self._period_s

    def _quiet(self) -> list[int]:
        return [other for other in self._not_done() if self._is_quiet(other)]

    def _decide(self, store: SignedStore, error: LaunchError, num_lost: int) -> None:
        self._adopt(store.store, store.put_first(VERDICT, peer_errors.to_json(error, num_lost)))

    def _adopt(self, store: Store, verdict: Any) -> None:
        error, num_lost = peer_errors.from_json(verdict)
        with suppress(dist.DistError):
            store.add("connect/acknowledged", 1)
            end = time.monotonic() + LINGER_S
            # Rank 0 serves the store from which the others still have to read this.
            serves = self._rank == 0 and not self._has_agent_store
            while serves and time.monotonic() < end:
                num_done = sum(self._is_done(store, other) for other in self._others())
                if store.add("connect/acknowledged", 0) >= len(self._infos) - num_done - num_lost:
                    break
                time.sleep(0.02)
        self._verdict = error

    def _lost_store(self, reason: str) -> LaunchError:
        if self._has_agent_store:
            return peer_errors.lost_agent(self._rank, reason)
        return peer_errors.lost(self._infos[0], f"its store is lost: {reason}")
