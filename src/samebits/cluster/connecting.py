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

from samebits.cluster import stacks
from samebits.cluster.rendezvous import RankInfo, ranks_text
from samebits.cluster.signed import SignedStore, count_and_linger, error_from_store, peek
from samebits.cluster.silence import Silence
from samebits.cluster.timeout import REPORT_EVERY_S, as_clock, call_with_timeout, wait_until
from samebits.errors import LaunchError
from samebits.errors import to_json as error_to_json
from samebits.open_files import explained, is_too_many_files, too_many_files
from samebits.scratch import is_running

# Log lines and errors of ranks that have joined and then wait for connections to each other.


# How gloo reports a peer that had connected and then ended.
_ENDED_PEER = ("closed by peer", "reset by peer", "broken pipe")
# Parts of the messages with which torch, gloo and NCCL report the loss of another rank.
LOST_PEER = (*_ENDED_PEER, "connection refused", "gloo", "nccl", "timed out waiting")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error reports the loss of another process, whose own error has the reason.

    torch raises a RuntimeError for it. An OSError about a connection comes from something else, such as a download or a
    closed terminal.
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in LOST_PEER)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def name(info: RankInfo) -> str:
    """Return a rank with its host and process id: rank 1 (host, pid 77)."""
    return f"rank {info.rank} ({info.host}, pid {info.pid})"


def still_waiting(
    infos: Sequence[RankInfo],
    missing: Sequence[int],
    waited_s: float,
    limit_s: float,
    quiet: Sequence[RankInfo],
) -> str:
    """Format the log line for a group that takes long to connect; `quiet`: ranks that have stopped reporting."""
    names = f"\n  no sign of life from {', '.join(map(name, quiet[:4]))}" if quiet else ""
    have = "has" if len(missing) == 1 else "have"
    return (
        f"connecting {len(infos)} processes: {ranks_text(missing)} {have} not connected, {waited_s:.0f} s{names}"
        f"\n  giving up in {as_clock(limit_s - waited_s)} (cluster.join_timeout_s)"
    )


def lost_rank_error(info: RankInfo, reason: str) -> LaunchError:
    """Return the error for a rank that has ended or become unreachable."""
    return LaunchError(
        f"lost {name(info)} before all ranks were connected: {reason}",
        cause="it was killed or has failed, and its own output gives the reason; or its machine or network is down",
        fix="Start again; add --resume auto if the run has saved a checkpoint.",
    )


def gave_up(
    missing: Sequence[int], limit_s: float, stopped: Sequence[RankInfo], quiet: Sequence[RankInfo]
) -> LaunchError:
    """Return the error for a group that has not connected in time; `stopped`: by a signal or debugger, on this host."""
    what = f"gave up connecting: {ranks_text(missing)} had not connected after {limit_s:.0f} s"
    where = "cluster.join_timeout_s"
    if stopped:
        names = ", ".join(map(name, stopped))
        pids = " ".join(str(info.pid) for info in stopped)
        cause = f"stopped by SIGSTOP or a debugger: {names}"
        return LaunchError(
            what, where=where, cause=cause, fix=f"Resume it, then start again: kill -CONT {pids}"
        )
    if quiet:
        cause = f"no sign of life from {', '.join(map(name, quiet[:4]))}"
        return LaunchError(
            what, where=where, cause=cause, fix="Check those processes and the network to them."
        )
    return _unreachable(what, where)


def _unreachable(what: str, where: str | None = None) -> LaunchError:
    return LaunchError(
        what,
        where=where,
        cause="these processes are alive, but they use a network interface that the other machines cannot reach, "
        "or a firewall blocks their ports",
        fix="On each machine, set GLOO_SOCKET_IFNAME (cpu) or NCCL_SOCKET_IFNAME (cuda) to the right interface; "
        "`ip address` lists them.",
    )


def could_not_connect(info: RankInfo, failure: BaseException, refusals: str = "") -> LaunchError:
    """Return the error of torch for a group of live ranks; `refusals`: evidence that another program uses the store."""
    if is_too_many_files(failure):
        return too_many_files()
    reason = first_line(failure)
    if any(part in reason.lower() for part in _ENDED_PEER):
        return LaunchError(
            f"{name(info)} lost another process before all ranks were connected",
            given=reason[:200],
            cause="that process has ended; its own output gives the reason",
            fix="Read the output of the other ranks.",
        )
    what = f"{name(info)} joined the rendezvous, but can't connect to the other ranks: {reason}"
    if refusals:
        fix = "End the other program; `ss -tnp` lists the programs connected to the run's ports."
        return LaunchError(what, cause=refusals, fix=fix)
    return explained(_unreachable(what))


def to_json(error: LaunchError, num_lost: int) -> dict[str, Any]:
    """Return a verdict, the error that all ranks but `num_lost` raise, as plain JSON for the store."""
    return {**error_to_json(error), "num_lost": num_lost}


def from_json(verdict: Any) -> tuple[LaunchError, int]:
    """Read a verdict from the store.

    Returns:
        The error that all ranks raise, and the number of lost ranks. For a damaged verdict, an error that reports the
        damage.
    """
    error = error_from_store(verdict)
    if error is None or type(verdict.get("num_lost")) is not int:
        return LaunchError(
            "another rank gave up connecting, but its reason in the store is damaged",
            fix="Read the output of the other ranks.",
        ), 1
    return error, verdict["num_lost"]


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
_ALIVE = "connect/alive"
_DONE = "connect/done"
_COUNT = "connect/count"


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
    with suppress(dist.DistError):  # rank 0 has ended: it had waited, so all have connected
        wait_until(lambda: store.add(_COUNT, 0) >= size, limit_s, 0.005)


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
        self._rank = rank
        self._infos = infos
        self._store = store
        self._limit_s = limit_s
        self._report = report
        self._has_agent_store = has_agent_store
        # Each rank reads a key of every other one, so large worlds look less often.
        self._period_s = max(PERIOD_S, len(infos) / 256)
        self._silence = Silence(2 * self._period_s)
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
                self._report(still_waiting(self._infos, missing, waited_s, self._limit_s, quiet))

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
        store = None
        pause_s = FIRST_LOOK_S
        while True:
            self._wake.wait(pause_s)
            if self._is_over:
                return
            self._wake.clear()
            pause_s = self._period_s
            try:
                store = store or self._store.clone()
                store.store.set(f"{_ALIVE}/{self._rank}", str(time.monotonic()))
                if (verdict := store.get(VERDICT)) is not None:
                    self._adopt(store, verdict)
                elif (ended := self._find_ended(store.store)) is not None:
                    self._decide(
                        store,
                        lost_rank_error(self._infos[ended], "its process has ended"),
                        num_lost=1,
                    )
                else:
                    self._judge(store)
                if self._verdict is not None:
                    return
            except dist.DistError as error:
                self._verdict = self._lost_store(first_line(error))
                return
            self._unanswered_s = 0.0

    def _judge(self, signed: SignedStore) -> None:
        """Find a silent rank; only the lowest rank that is alive and not connected does this, for all ranks."""
        store = signed.store
        reports: dict[int, bytes | None] = {}
        is_lowest = True
        for other in self._others():
            if self._is_done(store, other):
                continue
            reports[other] = peek(store, f"{_ALIVE}/{other}")
            if other < self._rank and not self._is_quiet(other) and self._failure is None:
                is_lowest = False
                break
        self._alive |= self._silence.look(reports)  # the first report may be old
        self._is_lowest = is_lowest
        if not is_lowest:
            return
        silent = [other for other in self._not_done() if self._silence.of(other) >= SILENT_S]
        if silent:
            reason = f"no sign of life for {SILENT_S:.0f} s"
            self._decide(
                signed, lost_rank_error(self._infos[silent[0]], reason), num_lost=len(silent)
            )
        elif isinstance(self._failure, TimeoutError):
            waiting = self._not_done()
            quiet = self._quiet()
            if self._alive.issuperset(set(waiting).difference(quiet)):
                infos = [self._infos[other] for other in waiting]
                stopped = [
                    info for info in infos if self._is_here(info) and stacks.is_stopped(info.pid)
                ]
                lost = [self._infos[other] for other in quiet]
                error = gave_up(sorted([*waiting, self._rank]), self._limit_s, stopped, lost)
                self._decide(signed, error, num_lost=len(quiet))
        elif self._failure is not None and self._alive.issuperset(self._not_done()):
            mine = self._infos[self._rank]
            self._decide(
                signed, could_not_connect(mine, self._failure, signed.refusal_cause()), num_lost=0
            )

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
        return self._silence.of(other) >= QUIET_S + self._period_s

    def _quiet(self) -> list[int]:
        return [other for other in self._not_done() if self._is_quiet(other)]

    def _decide(self, store: SignedStore, error: LaunchError, num_lost: int) -> None:
        self._adopt(store, store.put_first(VERDICT, to_json(error, num_lost)))

    def _adopt(self, store: SignedStore, verdict: Any) -> None:
        error, num_lost = from_json(verdict)

        def num_readers() -> int:
            num_done = sum(self._is_done(store.store, other) for other in self._others())
            return len(self._infos) - num_done - num_lost

        # Rank 0 serves the store from which the others still have to read this.
        serves = self._rank == 0 and not self._has_agent_store
        count_and_linger(store, "connect/acknowledged", serves, num_readers, LINGER_S)
        self._verdict = error

    def _lost_store(self, reason: str) -> LaunchError:
        if self._has_agent_store:
            # torchrun's agent serves the store.
            return LaunchError(
                f"rank {self._rank} lost the store of torchrun's agent before all ranks were connected",
                given=reason,
                cause="that agent has ended",
                fix="Start torchrun again; add --resume auto if the run has saved a checkpoint.",
            )
        return lost_rank_error(self._infos[0], f"its store is lost: {reason}")
