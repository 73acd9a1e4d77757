"""Supervise the worker processes: forward stop signals to them, and determine the root cause of a failure.

Two things end a round of workers, and both may come at once:

    SIGINT/SIGTERM -> handler sets `stop` -> forward_stop(): STOP_FILE and SIGTERM to every worker -> they save and exit
                                             after stop_timeout_s: SIGKILL
    a worker fails -> find_cause(): wait GRACE_S for its peers -> SIGKILL the rest -> read reports -> `cause`

- A signal handler may run between any two instructions, so it only sets attributes and writes one line. The launcher's
  next poll acts.
- A worker that is still starting ignores SIGTERM or dies of it without a report. STOP_FILE covers that time: a worker
  checks it after it has installed its handler.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TypeVar

from samebits import scratch
from samebits.cluster.signals import STOP_SIGNALS, end_group, handled
from samebits.cluster.timeout import wait_until
from samebits.errors import printable, wrap_error
from samebits.launch import failures
from samebits.launch.failures import ErrorReport, ProcessFailure, RootCause
from samebits.launch.worker import STOP_FILE, WorkerResult

# How long the peers of a failed process may take to fail by themselves before they are killed: they cannot continue,
# and may block in a collective for as long as its timeout. Their reports decide on the root cause.
GRACE_S = 1.5
# Signals within this time count as one: a terminal and a parent process may each send one.
SAME_SIGNAL_S = 0.3
_ERROR = re.compile(r"[a-z]+ error: ")  # the first words of a SamebitsError

Processes = Mapping[int, BaseProcess]
T = TypeVar("T")


class StopRequested(Exception):
    """A wait was ended by a signal."""


class Supervisor:
    """Supervision of one node's workers by its launcher.

    Args:
        stop_timeout_s: How long workers may take to stop, seconds.
        log_dir: Folder of launcher.log, a copy of what is printed; None: no log.
        on_stop: Returns what the workers do after a stop signal, for the user.
    """

    def __init__(
        self, folder: Path, stop_timeout_s: float, log_dir: Path | None, on_stop: Callable[[], str]
    ) -> None:
        self.folder = folder
        self.stop_timeout_s = stop_timeout_s
        self.on_stop = on_stop
        self.log = log_dir / "launcher.log" if log_dir is not None else None
        self.fix = failures.RESUME  #: What the user can do after a lost process.
        self.stop: signal.Signals | None = (
            None  #: The first stop signal; None while there was none.
        )
        self.cause: RootCause | None = (
            None  #: The root cause of the last failure; None while there was none.
        )
        self._stop_since = 0.0
        self._signalled: set[int] = set()
        self._overdue = False
        self._memory_kills = failures.count_memory_kills()

    def report(self, text: str) -> None:
        """Print a text to stderr and append it to launcher.log."""
        text = printable(text)
        # A closed terminal or a full disk must not hide how the run ends.
        with suppress(OSError):
            is_wrapped = sys.stderr.isatty() and _ERROR.match(text)  # a traceback stays as it is
            shown = wrap_error(text, shutil.get_terminal_size().columns) if is_wrapped else text
            print(f"{_over_progress()}{shown}", file=sys.stderr, flush=True)
        if self.log is not None:
            with suppress(OSError):
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("a", encoding="utf-8") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def exit_code(self, failed: bool, returned: Mapping[int, WorkerResult]) -> int:
        """Return the command's exit code. `failed`: some worker did not complete its work."""
        if self.stop is not None:
            return 128 + self.stop
        if not failed:
            return next(
                (returned[rank].code for rank in sorted(returned) if returned[rank].code), 0
            )
        return self.cause.exit_code if self.cause is not None else 1

    def signals(self, pids: Callable[[], Sequence[int]]) -> AbstractContextManager[None]:
        """Return a context that handles signals: the first stops the workers, a second one kills them and exits."""

        def handle(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            # os.write, as print may be interrupted in its own lock and would deadlock or raise here.
            if self.stop is None:
                self.stop = signal.Signals(number)
                self._stop_since = now
                again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
                text = f"{_over_progress()}{self.stop.name}: {self.on_stop()}; {again} to exit at once\n"
                with suppress(OSError):
                    os.write(2, text.encode())
            elif now - self._stop_since > SAME_SIGNAL_S:
                send_signal(pids(), signal.SIGKILL)
                # `os._exit` runs no exit handler, so the folder's lock is given up here.
                scratch.release(self.folder)
                # At once: the user has asked twice, and Python's shutdown can wait for threads.
                os._exit(128 + number)

        return handled(STOP_SIGNALS, handle)

    def raise_if_stop_requested(self) -> None:
        """End a wait during which there are no workers to stop. Raises StopRequested if a stop signal was received."""
        if self.stop is not None:
            raise StopRequested

    def end_message(self, code: int) -> str:
        """Return the text for other nodes about an end with this exit code; empty for success."""
        if code == 0:
            return ""
        host = socket.gethostname()
        if self.stop is not None:
            return f"the run was stopped by {self.stop.name} on {host}"
        return self.cause.text if self.cause is not None else f"the run was stopped on {host}"

    def request_stop(self, pids: Sequence[int] | set[int]) -> None:
        """Make workers save and stop. A worker that has not installed its signal handler yet finds the file instead."""
        (self.folder / STOP_FILE).touch()
        send_signal(pids, signal.SIGTERM)

    def clear_stop_request(self) -> None:
        """Remove the request after its workers have ended, so that others can start."""
        if self.stop is None:
            (self.folder / STOP_FILE).unlink(missing_ok=True)

    def forward_stop(self, running: Sequence[int]) -> None:
        """Forward a stop signal, if there was one, to the running workers. The launcher calls this at each poll."""
        if self.stop is None:
            return
        # Workers that were restarted meanwhile have new ids, and have not been signalled yet.
        pids = {*running}
        # Once for each process: a second SIGTERM would end it at once, before it has saved.
        self.request_stop(pids - self._signalled)
        self._signalled |= pids
        if time.monotonic() - self._stop_since > self.stop_timeout_s and not self._overdue:
            self._overdue = True
            self.report(
                f"killed the processes: they did not stop within {self.stop_timeout_s:.0f} s. "
                "Set a larger cluster.stop_timeout_s if a step takes longer."
            )
            send_signal(pids, signal.SIGKILL)

    def find_cause(self, processes: Processes, reports: Mapping[int, Path]) -> None:
        """Determine why a worker has failed, of all that are not done, report it, and end the others."""
        wait_until(
            lambda: all(process.exitcode is not None for process in processes.values()),
            GRACE_S,
            0.01,
        )
        # Still running after the grace time: blocked in a collective, so its exit code has no information on the cause.
        late = {rank for rank, process in processes.items() if process.exitcode is None}
        send_signal(
            [process.pid for rank, process in processes.items() if rank in late and process.pid],
            signal.SIGKILL,
        )
        for process in processes.values():
            # Reaped here: only then the exit code of a killed process is known.
            process.join(GRACE_S)
            # Each rank of a script leads a session. What it has left, such as workers of its loaders, would notice its
            # end later: when the folder with their sockets is gone, each with a traceback.
            if process.pid is not None:
                end_group(process.pid)
        process_failures = [
            ProcessFailure(
                rank,
                process.pid or 0,
                process.exitcode or 0,
                read_report(reports[rank], ErrorReport),
                rank in late,
            )
            for rank, process in processes.items()
        ]
        first = failures.root_cause(process_failures)
        # A worker that had no handler yet dies of the forwarded SIGTERM: that is the stop, and not a failure.
        if self.stop is not None and (
            self._overdue or first.exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        ):
            return
        memory = (
            failures.out_of_memory(first.pid, self._memory_kills)
            if first.exit_code == -signal.SIGKILL
            else ""
        )
        self.cause = failures.explain(first, socket.gethostname(), memory, self.fix)
        # A hang that blames only ranks of other nodes is handled there; this node's restarts are not charged for it.
        culprits = first.report.culprits if first.report is not None else ()
        if culprits and not set(culprits) & set(processes):
            self.cause = dataclasses.replace(self.cause, is_elsewhere=True)
        self.report(self.cause.text)


def read_report(path: Path, kind: type[T]) -> T | None:
    """Return what a worker has reported of its end; None if it left nothing, like a process that was killed."""
    # A report that was not finished has another name, .part.
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _over_progress() -> str:
    """Return the escape codes that clear rank 0's progress line and the terminal's `^C`; empty without a terminal."""
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in (
        "",
        "dumb",
        "unknown",
    )
    return "\r\x1b[2K" if is_terminal else ""


def send_signal(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        # Between a look and a signal a process may end, and its parent may have reaped it.
        with suppress(ProcessLookupError):
            os.kill(pid, number)
