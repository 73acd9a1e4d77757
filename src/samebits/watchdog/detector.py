"""Hang detector: finds the rank that keeps all others waiting, dumps every rank's stacks, and ends the world.

Each rank has two threads that wake about once a second. They are separate because the second one may block: rank 0's
process serves the store, and does not answer while it hangs.

    monitor thread    has Activity.num_beats grown? -> stalled_s;  stalled_s >= timeout -> verdict -> stacks -> abort
    exchange thread   put watch/RANK (heartbeat); once stalled for timeout/2: read all heartbeats, share the verdict

No clock is compared between machines: a rank measures by its own clock how long another heartbeat stays unchanged.
The first verdict in the store wins (`put_first`), so all ranks report the same culprit. Between a verdict and the
abort a rank waits `_ending_s`, for the other ranks to read the verdict and dump their stacks.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from samebits.cluster import abort, collectives, stacks
from samebits.cluster.activity import COMPUTING, READING
from samebits.cluster.connecting import is_lost_peer
from samebits.cluster.rendezvous import ranks_text
from samebits.cluster.signed import SignedStore, read_as
from samebits.cluster.silence import Silence
from samebits.cluster.world import World
from samebits.errors import HangError

# Determine which ranks keep a stalled world waiting, from the ranks' last heartbeats. Plain arithmetic.


TIMEOUT_SETTING = "watch.hang_timeout_s"
SILENT_S = 10.0  # a heartbeat arrives about once a second


@dataclass(frozen=True)
class RankStatus:
    """Last heartbeat of one rank."""

    rank: int  #: Its rank.
    host: str  #: Its machine.
    pid: int  #: Its process id.
    doing: str  #: Its activity; empty if it has never reported.
    waits: bool  #: Whether the activity waits for other ranks.
    step: int | None  #: The optimizer step; None outside of steps.
    stalled_s: float  #: Time without progress at the heartbeat, seconds.
    silent_s: float = 0.0  #: Age of the heartbeat by the reader's clock, seconds.
    is_here: bool = False  #: It runs on the reader's machine.
    is_stopped: bool = False  #: Its process is stopped, for example by SIGSTOP.
    serves: bool = False  #: It serves the store through which ranks exchange heartbeats.

    @property
    def still_s(self) -> float:
        """Return the longest time that it may have made no progress, seconds."""
        return self.stalled_s + self.silent_s

    @property
    def where(self) -> str:
        """Describe its activity and step."""
        return self.doing + (f", step {self.step:,}" if self.step is not None else "")


def find_stalled_ranks(statuses: Sequence[RankStatus], timeout_s: float) -> list[RankStatus]:
    """Find the ranks that keep all others waiting, if none has made progress for `timeout_s` seconds.

    These are the ranks that are silent or busy with an activity of their own while no rank makes progress. Ranks that
    wait for others are to blame only if there is no other: then they wait for each other.

    Returns:
        The stalled ranks; empty while some rank makes progress.
    """
    if any(status.still_s < timeout_s for status in statuses):
        return []
    silent = [status for status in statuses if is_silent(status, timeout_s)]
    if any(status.serves for status in silent):
        # Without the store, the state of the other ranks is unknown.
        return [status for status in silent if status.serves]
    return silent + [
        status for status in statuses if not status.waits and status not in silent
    ] or list(statuses)


def is_silent(status: RankStatus, timeout_s: float) -> bool:
    """Return whether a rank has sent no heartbeat for so long that it probably cannot."""
    return status.silent_s >= min(SILENT_S, timeout_s / 2)


def explain(
    culprits: Sequence[RankStatus],
    size: int,
    timeout_s: float,
    stacks: str,
    setting: str = TIMEOUT_SETTING,
) -> HangError:
    """Build the error for the user.

    Args:
        culprits: Result of `find_stalled_ranks`, at least one rank.
        size, timeout_s: Number of ranks, and the setting `watch.hang_timeout_s`.
        setting: How the user sets the timeout. A script has no launcher of Samebits that could restart it.
    """
    first = culprits[0]
    names = ranks_text([status.rank for status in culprits]) if size > 1 else "the run"
    verb = "have" if len(culprits) > 1 else "has"
    silent = is_silent(first, timeout_s)
    still = f"{first.still_s:.0f} s"
    if first.waits and not silent:
        what = f"all ranks have waited for each other for {still}: {first.where}"
    elif silent:
        last = f"; last seen {first.where}" if first.doing else ""
        what = f"{names} {verb} given no sign of life for {first.silent_s:.0f} s{last}"
    else:
        what = f"{names} {verb} made no progress for {still}: {first.where}"
    others = size - len(culprits)
    error = HangError(
        what,
        given=f"{others} rank{'s' if others > 1 else ''} waited for {'it' if len(culprits) == 1 else 'them'}"
        if others
        else None,
        where="\n".join(
            [
                *(
                    f"rank {status.rank} (host {status.host}, pid {status.pid})"
                    for status in culprits[:8]
                ),
                f"stacks: {stacks}",
            ]
        ),
        cause=_likely_cause(first, silent),
        fix=f"If it is only slow, set {setting}={3 * timeout_s:.0f}."
        + (" To restart after a hang, set --max-restarts." if setting == TIMEOUT_SETTING else ""),
    )
    error.ranks = tuple(status.rank for status in culprits)
    return error


def _likely_cause(status: RankStatus, silent: bool) -> str:
    if status.is_stopped:
        return (
            f"its process is stopped, by SIGSTOP or a debugger: kill -CONT {status.pid} resumes it"
        )
    if silent and status.is_here:
        # In a network namespace of its own, as a container may have, its messages can be lost here too.
        return "native code never releases Python's interpreter lock, see its stack; or the network to it is cut"
    if silent:
        return "its machine or the network to it is down, or native code there never releases the interpreter lock"
    if status.waits:
        return "the network between them is cut, or model code on one rank starts collectives of its own"
    if status.doing == READING:
        return "a read that never returns: a network disk, a lock, a download; see its stack"
    if status.doing == COMPUTING:
        return "the model's code does not return, or the device does not answer; see its stack"
    return "see its stack"


LOGGER = logging.getLogger("samebits")
VERDICT = "watch/verdict"
# Timeout of the store's calls.
ANSWER_S = 60.0


@dataclass(frozen=True)
class Heartbeat:
    """What a rank reports about once a second."""

    beat: float  #: Differs from that of the heartbeat before; no clock of another process is compared.
    stalled_s: float  #: Time without progress, seconds.
    doing: str  #: Its activity.
    waits: bool  #: Whether the activity waits for other ranks.
    step: int | None  #: The optimizer step; None outside of steps.
    work_s: float  #: Seconds of own work, in
    num_steps: int  #: so many steps, and
    num_micro_batches: int  #: so many micro-batches.


@dataclass(frozen=True)
class _StackInfo:
    """Where a rank runs, and the descriptor of its file for stacks."""

    host: str
    pid: int
    namespace: str
    descriptor: int


class HangDetector:
    """Context in which a rank without progress is found, and the world ends with an error that names it.

    Progress is every activity that the main thread enters (`World.activity`): reading, computing, waiting for others,
    evaluating another batch. Time during which this process was stopped, or its machine asleep, does not count.

    Args:
        timeout_s: How long all ranks may make no progress, seconds; None: forever.
        setting: How the user sets the timeout, for the error's fix, without its value.
    """

    def __init__(
        self, world: World, timeout_s: float | None, log_dir: Path, setting: str = TIMEOUT_SETTING
    ) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._log_dir = log_dir
        self._setting = setting
        # Several times within the timeout; with thousands of ranks less often, since one store answers all of them.
        self._period_s = max(min(1.0, (timeout_s or 10.0) / 8), world.size / 256)
        self._stalled_s = 0.0
        self._last_reported: list[Heartbeat] = []
        self._silence = Silence(2 * self._period_s)
        self._beats: list[float | None] = [None] * world.size
        self._verdict: dict[str, Any] | None = None
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "HangDetector":
        self._stacks = stacks.StackDumper()
        info = _StackInfo(
            self._world.host, os.getpid(), stacks.namespace(), self._stacks.descriptor
        )
        self._infos = [
            _StackInfo(**found)
            for found in collectives.all_gather_object(self._world, asdict(info))
        ]
        works = [self._monitor, *([self._exchange] if self._world.signed is not None else [])]
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True) for work in works
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._verdict is not None and error is not None and is_lost_peer(error):
            # Another rank ended first because of a hang that this rank has detected too: report the hang.
            self._threads[0].join(2 * self._ending_s)
        self._is_over.set()
        for thread in self._threads:
            # With a limit: a thread that waits for the store must not delay the end of the run.
            thread.join(1.0)
        self._stacks.close()

    def work(self) -> list[tuple[float, int, int]]:
        """Return seconds of own work, steps and micro-batches of each rank, as last received on rank 0.

        Empty until every rank has sent a heartbeat.
        """
        return [
            (status.work_s, status.num_steps, status.num_micro_batches)
            for status in self._last_reported
        ]

    def _own_status(self) -> Heartbeat:
        now = self._world.activity
        return Heartbeat(
            time.monotonic(), self._stalled_s, now.doing, now.waits, now.step, now.work_s, now.num_steps,
            now.num_micro_batches,
        )  # fmt: skip

    def _exchange(self) -> None:
        world = self._world
        assert world.signed is not None
        keys = [f"watch/{rank}" for rank in range(world.size)]
        try:
            # A connection of its own: a call of the main thread may block the other for long.
            store = world.signed.clone()
            store.store.set_timeout(timedelta(seconds=ANSWER_S))
            while not self._is_over.wait(self._period_s):
                store.put(keys[world.rank], asdict(self._own_status()))
                # Other ranks read heartbeats only while they are stalled, so the store's load is linear in ranks.
                if not world.is_main and self._stalled_s < (self._timeout_s or 1e9) / 2:
                    continue
                self._read_reports(store, keys)
                verdict = self._verdict
                found = store.get(VERDICT) if verdict is None else store.put_first(VERDICT, verdict)
                self._verdict = found if _is_verdict(found, world.size) else verdict
        except RuntimeError as error:
            # The store ended with rank 0; ranks that wait for rank 0 see that too.
            LOGGER.info("heartbeat: %s", str(error).splitlines()[:1])

    def _read_reports(self, store: SignedStore, names: list[str]) -> None:
        # One call for all keys, unless one is missing: a rank has not started, or another program deleted it.
        found = (
            store.get_all(names)
            if store.store.check(names)
            else [store.get(name) for name in names]
        )
        before: Sequence[Heartbeat | None] = self._last_reported or [None] * self._world.size
        reported: list[Heartbeat] = []
        for rank, (old, value) in enumerate(zip(before, found, strict=True)):
            new = read_as(Heartbeat, value)
            if new is None and value is not None:
                store.refuse(names[rank], "it is not a rank's heartbeat")
            if new is not None:
                self._beats[rank] = new.beat
            # An invalid heartbeat leaves the last valid one in place.
            if (last := new or old) is not None:
                reported.append(last)
        if len(reported) == self._world.size:
            self._last_reported = reported

    def _monitor(self) -> None:
        rank = self._world.rank
        activity = self._world.activity
        while not self._is_over.wait(self._period_s):
            beats = dict(enumerate(self._beats))
            # This rank is judged by its activities, not by its heartbeat. A pause counts as progress.
            beats[rank] = time.monotonic() if activity.is_paused else activity.num_beats
            self._silence.look(beats)
            self._stalled_s = self._silence.of(rank)
            if self._timeout_s is None:
                continue
            if self._verdict is None and self._stalled_s >= self._timeout_s:
                culprits = find_stalled_ranks(self._statuses(), self._timeout_s)
                if culprits:
                    self._verdict = {
                        "by": self._world.rank,
                        "culprits": [asdict(status) for status in culprits],
                    }
            if self._verdict is not None:
                self._abort()

    def _statuses(self) -> list[RankStatus]:
        world = self._world
        never = Heartbeat(0.0, 0.0, "", False, None, 0.0, 0, 0)
        statuses = []
        for rank, info in enumerate(self._infos):
            is_me = rank == world.rank
            last = (
                self._own_status()
                if is_me
                else self._last_reported[rank]
                if self._last_reported
                else never
            )
            mine = self._infos[world.rank]
            is_here = info.host == mine.host and info.namespace == mine.namespace != ""
            statuses.append(
                RankStatus(
                    rank,
                    info.host,
                    info.pid,
                    last.doing,
                    last.waits,
                    last.step,
                    last.stalled_s,
                    silent_s=0.0 if is_me else self._silence.of(rank),
                    is_here=is_here,
                    is_stopped=is_here and stacks.is_stopped(info.pid),
                    serves=rank == 0 and not is_me and not world.assignment.agent_store,
                )
            )
        return statuses

    def _abort(self) -> None:
        assert self._timeout_s is not None
        for status in self._statuses():
            head = f"rank {status.rank} (host {status.host}, pid {status.pid}): {status.where}"
            if status.rank == self._world.rank:
                self._stacks.write(self._path(status.rank), head)
            elif status.is_here and is_silent(status, self._timeout_s):
                # A silent rank cannot dump its stacks; ranks of its machine do it, and all of them write the same.
                stacks.write_for(
                    status.pid, self._infos[status.rank].descriptor, self._path(status.rank), head
                )
        # Time for the verdict to reach the others, for their stacks, and to read an earlier verdict.
        time.sleep(self._ending_s)
        assert self._verdict is not None
        culprits = [RankStatus(**status) for status in self._verdict["culprits"]]
        error = explain(
            culprits, self._world.size, self._timeout_s, self._stacks_text(culprits), self._setting
        )
        if LOGGER.hasHandlers():  # else logging would print what is printed below
            LOGGER.error("%s", error)
        for handler in LOGGER.handlers:
            handler.flush()
        abort.abort(error)

    @property
    def _ending_s(self) -> float:
        return 3 * self._period_s + 2 * stacks.WRITING_S

    def _path(self, rank: int) -> Path:
        return self._log_dir / f"stacks-rank-{rank}.txt"

    def _stacks_text(self, culprits: list[RankStatus]) -> str:
        text = f"{self._log_dir}/stacks-rank-*.txt"
        assert self._timeout_s is not None
        mute = [
            status.rank
            for status in culprits
            if is_silent(status, self._timeout_s) and not self._has_stacks(status.rank)
        ]
        return f"{text} (none of {ranks_text(mute)})" if mute else text

    def _has_stacks(self, rank: int) -> bool:
        # A restarted run may have older files.
        with suppress(OSError):
            return time.time() - self._path(rank).stat().st_mtime < 60
        return False


def _is_verdict(value: Any, size: int) -> bool:
    """Return whether a value from the store is a verdict."""
    culprits = value.get("culprits") if isinstance(value, dict) else None
    if not isinstance(culprits, list) or not culprits:
        return False
    statuses = [read_as(RankStatus, status) for status in culprits]
    return all(status is not None and 0 <= status.rank < size for status in statuses)
