"""Watches over the processes that the launcher has started: stops them when asked, and finds out why they died."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from lockstep import scratch
from lockstep.errors import printable
from lockstep.launch import failures, forkserver
from lockstep.launch.failures import ErrorReport, ProcessFailure, RootCause
from lockstep.launch.forkserver import LAUNCHER_ONLY
from lockstep.launch.worker import STOP_FILE, WorkerResult, report_path

# How long the peers of a dead process get to fail by themselves, before they are killed: they can't go on, and may
# hang in a collective for as long as its timeout.
GRACE_S = 1.5
# Two signals within this time are one: a terminal and a parent process may both send theirs.
SAME_SIGNAL_S = 0.3

Processes = Mapping[int, BaseProcess]


class StopRequested(Exception):
    """A wait was ended by a signal."""


class Supervisor:
    """The launcher's side of its workers' lives.

    Args:
        folder: Where workers report failures.
        stop_timeout_s: How long they may take to stop.
        log_dir: Folder of launcher.log, a copy of what is printed.
        on_stop: Returns what the workers do then, for the user.
    """

    def __init__(self, folder: Path, stop_timeout_s: float, log_dir: Path | None, on_stop: Callable[[], str]) -> None:
        self.folder = folder
        self.stop_timeout_s = stop_timeout_s
        self.on_stop = on_stop
        self.log = log_dir / "launcher.log" if log_dir is not None else None
        self.stop: signal.Signals | None = None
        self.cause: RootCause | None = None
        self._stop_since = 0.0
        self._signalled: set[int] = set()
        self._overdue = False
        self._memory_kills = failures.count_memory_kills()

    def report(self, text: str) -> None:
        """Write it to stderr and to launcher.log."""
        text = printable(text)
        # A closed terminal or a full disk must not hide how the run ends.
        with suppress(OSError):
            print(f"{_over_progress()}{text}", file=sys.stderr, flush=True)
        if self.log is not None:
            with suppress(OSError):
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def exit_code(self, failed: bool, returned: Mapping[int, WorkerResult]) -> int:
        """What the command exits with.

        Args:
            failed: Some worker did not come to its end.
            returned: What the workers' entries returned, by rank.
        """
        if self.stop is not None:
            return 128 + self.stop
        if not failed:
            return next((returned[rank].code for rank in sorted(returned) if returned[rank].code), 0)
        return self.cause.exit_code if self.cause is not None else 1

    @contextmanager
    def signals(self, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
        """While it is open, a signal stops the workers; a second one kills them and ends the launcher at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self.stop is None:
                self.stop, self._stop_since = signal.Signals(number), now
                again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
                text = f"{_over_progress()}{self.stop.name}: {self.on_stop()}; {again} to exit at once\n"
                with suppress(OSError):
                    os.write(2, text.encode())
            elif now - self._stop_since > SAME_SIGNAL_S:
                send_signal(pids(), signal.SIGKILL)
                scratch.release(self.folder)
                os._exit(128 + number)

        before = {}
        for number in LAUNCHER_ONLY:
            # nohup: whoever started us wants this signal to be ignored.
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def raise_if_stop_requested(self) -> None:
        """End a wait that has no processes to stop yet.

        Raises:
            AskedToStop: Somebody has asked to stop.
        """
        if self.stop is not None:
            raise StopRequested

    def end_message(self, code: int) -> str:
        """What other machines are told of an end with this exit code."""
        if code == 0:
            return ""
        host = socket.gethostname()
        if self.stop is not None:
            return f"the run was stopped by {self.stop.name} on {host}"
        return self.cause.text if self.cause is not None else f"the run was stopped on {host}"

    def request_stop(self, pids: Sequence[int] | set[int]) -> None:
        """Let processes save and stop; one that is only starting, and has no ears yet, finds the file."""
        (self.folder / STOP_FILE).touch()
        send_signal(pids, signal.SIGTERM)

    def clear_stop_request(self) -> None:
        """Those that were asked to stop are gone: others may be started."""
        if self.stop is None:
            (self.folder / STOP_FILE).unlink(missing_ok=True)

    def poll(self, processes: Processes, restart: int) -> None:
        """Look after the workers once: pass a stop on, or note why one has died and end the others.

        Args:
            processes: By rank.
            restart: How often they have been started again.
        """
        forkserver.keep_tracker_alive()
        # A worker that is done waits for the others, so whoever has ended before that has failed.
        if any(process.exitcode is not None for process in processes.values()):
            self._record_failures(processes, restart)
        elif self.stop is not None:
            self._forward_stop(processes)

    def _forward_stop(self, processes: Processes) -> None:
        pids = {process.pid for process in processes.values() if process.pid is not None}
        self.request_stop(pids - self._signalled)
        self._signalled |= pids
        if time.monotonic() - self._stop_since > self.stop_timeout_s and not self._overdue:
            self._overdue = True
            self.report(
                f"killed the processes: they did not stop within {self.stop_timeout_s:.0f} s; "
                "set a larger cluster.stop_timeout_s if a step takes longer"
            )
            send_signal(pids, signal.SIGKILL)

    def _record_failures(self, processes: Processes, restart: int) -> None:
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and any(process.exitcode is None for process in processes.values()):
            time.sleep(0.01)
        late = {rank for rank, process in processes.items() if process.exitcode is None}
        send_signal(
            [process.pid for rank, process in processes.items() if rank in late and process.pid], signal.SIGKILL
        )
        for process in processes.values():
            process.join(GRACE_S)
        process_failures = [
            ProcessFailure(
                rank, process.pid or 0, process.exitcode or 0, self._read_report(rank, restart), rank in late
            )
            for rank, process in processes.items()
        ]
        first = failures.root_cause(process_failures)
        if self.stop is not None and (self._overdue or first.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)):
            return
        memory = failures.out_of_memory(first.pid, self._memory_kills) if first.exit_code == -signal.SIGKILL else ""
        self.cause = failures.explain(first, socket.gethostname(), memory)
        culprits = first.report.culprits if first.report is not None else ()
        if culprits and not set(culprits) & set(processes):
            self.cause = dataclasses.replace(self.cause, is_elsewhere=True)
        self.report(self.cause.text)

    def _read_report(self, rank: int, restart: int) -> ErrorReport | None:
        try:
            return ErrorReport(**json.loads(report_path(self.folder, rank, restart).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def _over_progress() -> str:
    """What clears the line in which rank 0 draws its progress, and the terminal's `^C` behind it."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    return "\r\x1b[2K" if is_terminal else ""


def send_signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
