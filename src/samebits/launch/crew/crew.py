"""The processes of one machine: starts them, watches them, and names the members of the present view.

A view is a numbered list of members. After a loss the next view has either only new members, which start from the last
checkpoint, or, where `cluster.recovery` allows it, those that remain:

    a process is killed      next view: its members without it, urgent         the others finish the step
                             start a replacement                                it builds the run beside them
    the replacement is ready next view: the members and it                     all enter it between two steps
    a process is stopped     with in_step it is killed (SIGSTOP would block the others)
    an error, a loss while the run is being built, or of all: a view of new members, if a restart is left

Each loss takes one restart. When none is left, the run continues with fewer processes, down to `min_procs`.
"""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from samebits.cluster import stacks
from samebits.cluster.address import ReservedPort
from samebits.cluster.env import MEMBER, VIEWS
from samebits.cluster.store import serve_store
from samebits.cluster.views.membership import View, mark_path, write_view
from samebits.errors import LaunchError
from samebits.launch.crew.recovery import Recovery
from samebits.launch.failures import ErrorReport, ProcessFailure, explain, signal_name
from samebits.launch.nodes.rendezvous import count
from samebits.launch.supervisor import Supervisor, read_report, send_signal
from samebits.launch.worker import WorkerResult, run_worker

# One process of a crew: its environment, its start through the fork server, and how it ended.


VIEWS_FILE = "views.json"


@dataclass(frozen=True)
class Entry:
    """What the processes run."""

    function: Callable[..., object]  #: An importable function.
    args: tuple[Any, ...]  #: Its arguments.
    folder: Path  #: The launcher's temporary folder.
    stop_timeout_s: float  #: How long a process may continue after the launcher has died, seconds.
    key: str  #: Secret with which the processes sign messages.


@dataclass(frozen=True)
class LocalRanks:
    """Where the processes of one machine stand in the world when they start."""

    local_size: int  #: How many there are on this machine.
    round: int = 0  #: How often all processes were restarted before.
    first_rank: int = 0  #: Rank of the first one. Where members change, only the log's name.
    size: int = 0  #: Of the world; 0: `local_size`.
    address: str = "127.0.0.1"  #: Where rank 0 serves the store.
    port: int = (
        0  #: Its port; 0: the launcher names the members, and each view has a port of its own.
    )


@dataclass(frozen=True)
class MemberProcess:
    """A process that the launcher has started."""

    number: int  #: Never used again.
    slot: int  #: Its place among the processes of this machine; a replacement has that of the lost process.
    process: BaseProcess  #: The process.
    entry: Entry

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.exitcode is None

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended it, before it could report an error."""
        return (self.process.exitcode or 0) < 0 and not self.report.exists()

    @property
    def report(self) -> Path:
        """The file in which it reports a failure."""
        return _report_path(self.entry.folder, self.number)

    def has_marked(self, name: str) -> bool:
        """Return whether the member has come that far; see `membership.mark_path`."""
        return mark_path(self.entry.folder, name, self.number).exists()

    def result(self) -> WorkerResult | None:
        """Return how it ended; None if it is running or has failed."""
        if self.process.exitcode != 0:
            return None
        return read_report(_result_path(self.entry.folder, self.number), WorkerResult)


def pids_of(members: Iterable[MemberProcess]) -> list[int]:
    """Return the process ids of members that were started."""
    return [member.process.pid for member in members if member.process.pid]


def start_member(entry: Entry, number: int, slot: int, ranks: LocalRanks) -> MemberProcess:
    """Start a process."""
    environment = {
        "RANK": str(ranks.first_rank + slot),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(ranks.size or ranks.local_size),
        "LOCAL_WORLD_SIZE": str(ranks.local_size),
        "MASTER_ADDR": ranks.address,
        "MASTER_PORT": str(ranks.port or 1),
        "TORCHELASTIC_RESTART_COUNT": str(ranks.round),
        "TORCHELASTIC_RUN_ID": "samebits",
    }
    if not ranks.port:
        environment |= {VIEWS: str(entry.folder / VIEWS_FILE), MEMBER: str(number)}
    report = _report_path(entry.folder, number)
    # From the fork server, which has torch loaded: a replacement is ready in a fraction of its import.
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=_run, args=(environment, entry, number, report), name=f"rank-{slot}"
    )
    try:
        process.start()
    except (EOFError, ConnectionError, FileNotFoundError) as error:
        raise LaunchError(
            "the processes could not be started: the fork server has ended",
            cause="the machine or container ran out of memory (see dmesg), or another process killed it",
            fix="Start fewer processes (--procs), or give the container more memory; --resume auto continues.",
        ) from error
    return MemberProcess(number, slot, process, entry)


def _run(environment: dict[str, str], entry: Entry, number: int, report: Path) -> None:
    os.environ.update(environment)
    result = run_worker(
        entry.function, entry.args, entry.folder, entry.stop_timeout_s, entry.key, report
    )
    part = _result_path(entry.folder, number).with_suffix(".part")
    part.write_text(json.dumps(asdict(result)), encoding="utf-8")
    # Renamed when complete, as the launcher may look at any time.
    part.rename(part.with_suffix(".json"))


def _result_path(folder: Path, number: int) -> Path:
    return folder / f"result-{number}.json"


def _report_path(folder: Path, number: int) -> Path:
    return folder / f"failure-{number}.json"


LOCAL = "127.0.0.1"
# Short, as the other processes wait in the step until the launcher has seen a loss.
POLL_S = 0.02


class Crew:
    """Starts and supervises the processes.

    Args:
        min_procs: Give up with fewer than this.
        max_restarts: How many lost processes are replaced, and how often all are restarted.
        recovery: Whether the other processes continue without a lost one. Otherwise each loss restarts all.
    """

    def __init__(
        self, entry: Entry, supervisor: Supervisor, num_procs: int, min_procs: int, max_restarts: int,
        recovery: Recovery,
    ) -> None:  # fmt: skip
        self._entry = entry
        self._supervisor = supervisor
        self._num_procs = num_procs
        self._min_procs = min_procs
        self._max_restarts = max_restarts
        self._recovery = recovery
        self._keeps = recovery.in_step
        self._port = ReservedPort()
        self._num_restarts = self._num_started = self._round = 0
        self._processes: dict[int, MemberProcess] = {}  # by slot: those that run, or are done
        self._done: dict[int, WorkerResult] = {}
        self._view = View(-1, 0, ())
        self._stores: list[TCPStore] = []
        self._stopped_since: dict[int, float] = {}

    def pids(self) -> list[int]:
        """Return the process ids of the members."""
        return pids_of(self._processes.values())

    def run(self) -> tuple[bool, dict[int, WorkerResult]]:
        """Run until all are done or the run has failed; return whether it has, and the results of what is done."""
        try:
            self._start_all()
            while True:
                time.sleep(POLL_S)
                running = self._running()
                self._supervisor.forward_stop(pids_of(running))
                if self._keeps:
                    self._kill_stopped(running)
                ended = [member for member in self._processes.values() if not member.is_running]
                if ended and not self._handle(ended):
                    return True, self._done
                if not self._members() and (self._done or self._supervisor.stop is not None):
                    return False, self._done
                if self._keeps:
                    self._admit()
        finally:
            self._kill_all()
            self._stores = []
            self._port.close()

    def _kill_all(self) -> None:
        send_signal(self.pids(), signal.SIGKILL)
        for member in self._processes.values():
            # SIGKILL has been sent, so a process that is still there hangs in the kernel, such as on a dead disk.
            member.process.join(10.0)

    def _running(self) -> list[MemberProcess]:
        return [member for member in self._processes.values() if member.is_running]

    def _members(self) -> list[MemberProcess]:
        """Return the running members of the present view, by rank."""
        by_number = {member.number: member for member in self._processes.values()}
        return [by_number[number] for number in self._view.members if number in by_number]

    def _ranks(self) -> LocalRanks:
        """Where the processes of this machine stand when they start."""
        # Rank 0 serves the store, not the launcher: the others can then finish and save after the launcher was killed.
        return LocalRanks(self._num_procs, self._round, port=0 if self._keeps else self._view.port)

    def _start(self, slot: int, ranks: LocalRanks) -> None:
        self._processes[slot] = start_member(self._entry, self._num_started, slot, ranks)
        self._num_started += 1

    def _start_all(self) -> None:
        numbers = range(self._num_started, self._num_started + self._num_procs)
        # Before they start: a process that is in no view is a replacement.
        self._begin_view(list(numbers), is_urgent=True)
        for slot in range(self._num_procs):
            self._start(slot, self._ranks())

    def _begin_view(self, numbers: list[int], *, is_urgent: bool) -> None:
        number = self._view.number + 1
        if not self._keeps:
            # A new port for each view: a store with addresses of lost processes would stop half of the restarts.
            self._view = View(number, self._port.renew(LOCAL), tuple(numbers))
            return
        store = serve_store(LOCAL, 0, LOCAL, 60.0, "the launcher")
        urgent = number if is_urgent else self._view.urgent
        self._view = View(number, store.port, tuple(numbers), urgent)
        write_view(self._entry.folder / VIEWS_FILE, self._view)
        # Closes the store of a view that has lost a member, which ends calls that wait there. Without a loss, its
        # members still use it until the end of their step.
        self._stores = [store] if is_urgent else [*self._stores[-1:], store]

    # A stopped process keeps its connections open, so the others would wait for it without an error.
    def _kill_stopped(self, running: Sequence[MemberProcess]) -> None:
        now = time.monotonic()
        for member in running:
            pid = member.process.pid or 0
            if not stacks.is_stopped(pid):
                self._stopped_since.pop(pid, None)
            elif now - self._stopped_since.setdefault(pid, now) > self._recovery.stopped_s:
                stopped = f"{self._name(member)} was stopped by a signal for {self._recovery.stopped_s:g} s"
                self._supervisor.report(f"{stopped}: killing it")
                send_signal([pid], signal.SIGKILL)

    def _handle(self, ended: list[MemberProcess]) -> bool:
        """React to processes that have ended; return whether the run continues."""
        lost = []
        results = {member.number: member.result() for member in ended}
        # Completed ones first: a process that ends after them is not lost, since the run is complete.
        for member in sorted(ended, key=lambda member: results[member.number] is None):
            result = results[member.number]
            has_weights = member.has_marked("member")
            is_stopping = self._supervisor.stop is not None
            if result is not None and (has_weights or not self._keeps):
                self._done[member.slot] = result
                del self._processes[member.slot]
                self._note_done(member)
            elif not self._keeps:
                return self._restart()
            elif self._view.is_last or (is_stopping and not member.has_marked("ready")):
                # The run is complete, here or on another node, or it is being stopped.
                del self._processes[member.slot]
            elif member.is_killed or self._is_loss(member, has_weights):
                lost.append(member)
            else:
                return self._restart()
        return not lost or self._lose(lost)

    def _note_done(self, member: MemberProcess) -> None:
        """Report to the others that the run is complete: a process that is entering a view waits for it in vain."""
        if self._keeps:
            self._view = replace(self._view, is_last=True)
            write_view(self._entry.folder / VIEWS_FILE, self._view)

    def _is_loss(self, member: MemberProcess, has_weights: bool) -> bool:
        """Return whether the others continue without a process that has failed."""
        # Also a replacement that was stopped before it joined.
        return member.number not in self._view.members or not has_weights

    def _lose(self, lost: list[MemberProcess]) -> bool:
        numbers = {member.number for member in lost}
        survivors = [member for member in self._members() if member.number not in numbers]
        # Only members have the state of the run. Without one of them, it is in the last checkpoint only.
        has_weights = any(member.has_marked("member") for member in survivors)
        if not has_weights or not all(member.has_marked("ready") for member in survivors):
            return self._restart()
        is_stopping = self._supervisor.stop is not None
        members = set(self._view.members)
        for member in lost:
            del self._processes[member.slot]
        if numbers & members:  # before anything that takes time, since the survivors wait for it
            self._begin_view([member.number for member in survivors], is_urgent=True)
        for member in lost:
            if member.result() is None:
                self._supervisor.report(self._why(member))
            if is_stopping or (not member.is_killed and member.number not in members):
                continue
            self._start_replacement(member)
        if not is_stopping and len(self._processes) < self._min_procs:
            return self._fail(lost[0])
        if not is_stopping and len(self._processes) < self._num_procs:
            self._supervisor.report(
                f"continuing with {len(self._processes)} of {self._num_procs} processes"
            )
        return True

    def _start_replacement(self, lost: MemberProcess) -> bool:
        """Start a process in the place of a lost one, if a restart is left; return whether one was."""
        if self._num_restarts >= self._max_restarts:
            return False
        self._num_restarts += 1
        count = f"restart {self._num_restarts} of {self._max_restarts}"
        self._supervisor.report(
            f"{count}: the other processes continue, and a new one will join them"
        )
        self._start(lost.slot, self._ranks())
        return True

    def _admit(self) -> None:
        """Let replacements that are ready join, between two steps."""
        members = set(self._view.members)
        ready = [
            member.number
            for member in self._processes.values()
            if member.number not in members and member.is_running and member.has_marked("ready")
        ]
        if ready and not self._done and self._supervisor.stop is None:
            self._begin_view(
                [*(member.number for member in self._members()), *ready], is_urgent=False
            )

    def _fail(self, member: MemberProcess) -> bool:
        failure = ProcessFailure(
            member.slot, member.process.pid or 0, member.process.exitcode or 0, None
        )
        self._supervisor.cause = explain(failure, socket.gethostname())
        self._supervisor.report(self._supervisor.cause.text)
        return False

    def _restart(self) -> bool:
        """End all processes after a failure, and restart them from the last checkpoint if that can help."""
        supervisor = self._supervisor
        self._find_cause()
        if supervisor.stop is not None or supervisor.cause is None or not supervisor.cause.may_pass:
            return False
        if not self._plan_restart():
            return False
        supervisor.cause = None
        supervisor.clear_stop_request()  # of the former round: it would stop the new processes at once
        self._round += 1
        self._processes = {}
        self._done = {}
        self._start_all()
        return True

    def _plan_restart(self) -> bool:
        """Count a restart of all, and choose how many processes there are; return whether there are any."""
        if self._num_restarts < self._max_restarts:
            self._num_restarts += 1
            why = (
                f" (no recovery in the step with {reason})"
                if (reason := self._recovery.why_restart)
                else ""
            )
            what = f"restart {self._num_restarts} of {self._max_restarts} from the last checkpoint{why}"
            self._supervisor.report(what)
            return True
        if self._num_procs == self._min_procs:
            return False
        self._num_procs -= 1
        what = count(self._num_procs, "process", "es")
        self._supervisor.report(f"continuing with {what} instead of {self._num_procs + 1}")
        return True

    def _find_cause(self) -> None:
        processes = {slot: member.process for slot, member in self._processes.items()}
        self._supervisor.find_cause(
            processes, {slot: member.report for slot, member in self._processes.items()}
        )

    def _name(self, member: MemberProcess) -> str:
        return f"rank {member.slot} (host {socket.gethostname()}, pid {member.process.pid})"

    def _why(self, member: MemberProcess) -> str:
        code = member.process.exitcode or 0
        if code < 0:
            return f"{self._name(member)} was killed by signal {-code} ({signal_name(-code)})"
        report = read_report(member.report, ErrorReport)
        return f"{self._name(member)} could not join:\n{report.text if report is not None else f'exit code {code}'}"
