"""Start the trackers of a run on rank 0, one process each, and end them with the run.

The training process hands nothing over: a tracker reads the records from the run folder. So a tracker that is slow,
hangs or fails costs no step, and loses no record. `samebits track RUN` sends later what it missed.

A process, not a thread: samples may draw from the global generators of Python, numpy and torch, and a package that
draws a number beside them would change a sample.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samebits.cluster.signals import end_group
from samebits.plain_file import no_link, read_part
from samebits.report.trackers.process import FAILED, FOLDER
from samebits.report.trackers.tracker import Outcome, check_trackers, external, label

# At the end of a run, a tracker that has stored nothing for so long hangs.
_HANG_S = 10.0
# Longest start of a tracker, on a machine where the training leaves it little CPU time.
_START_S = 60.0
_MOST_S = 60.0  # that a run waits for a tracker that stores records
_TAIL_BYTES = 4000


class Trackers:
    """The trackers of a run, on rank 0. Nothing here raises once they are started; any thread may notify.

    Raises:
        ConfigError: A tracker cannot be imported.
    """

    def __init__(self, names: Sequence[str], run: Path, notify: Callable[[str], None]) -> None:
        check_trackers(names)
        self._names = external(names)
        self._run = run
        self._notify = notify
        self._processes: list[TrackerProcess] = []
        self.outcome: Outcome = "failed"  #: How the run ends; set before `close`.

    def start(self, *, is_new: bool) -> None:
        """Start the processes, if they were not started before; `is_new` if training starts from its first step."""
        # Taken away at once: a rollback calls `start` again.
        names = self._names
        self._names = []
        for name in names:
            try:
                self._processes.append(TrackerProcess(name, self._run, self._notify, is_new=is_new))
            except OSError as error:
                self._notify(
                    f"tracker {label(name)} could not be started: {error}; training continues without it"
                )

    def close(self) -> None:
        """End the processes: wait shortly for those that work, and kill those that hang."""
        # All are informed before the first wait, so that they finish side by side.
        for process in self._processes:
            process.end(self.outcome)
        for process in self._processes:
            process.close()
        self._processes = []


class TrackerProcess:
    """One tracker's process, as seen by the training process, in which any thread may notify.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self, name: str, run: Path, notify: Callable[[str], None], *, is_new: bool
    ) -> None:
        self._name = name
        self._run = run
        self._notify = notify
        self.has_failed = False  #: Whether it failed or was killed.
        self._began = self._ended = time.monotonic()
        self._log = run / "logs" / f"tracker-{label(name)}.log"
        self._stored_before = self._stored_at()
        self._log.parent.mkdir(exist_ok=True)
        # -P: without it, -m puts the current folder first on sys.path, where a wandb.py of a stranger may lie.
        command = [sys.executable, "-P", "-m", "samebits.report.trackers.process", name, str(run)]
        with open(self._log, "ab", opener=no_link) as log:
            self._child = subprocess.Popen(
                [*command, *(["--new"] if is_new else [])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,  # a tracker's children end with it, and Ctrl-C reaches only the training
            )
        # It names a failure when it happens, and not only at the end of the run.
        self._watcher = threading.Thread(
            target=self._watch, name=f"tracker-{label(name)}", daemon=True
        )
        self._watcher.start()

    def _watch(self) -> None:
        # WNOWAIT leaves the process as a zombie, so its number, and
        # that of its group, cannot be used again before the kill.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        end_group(self._child.pid)  # what is left of its processes
        code = self._child.wait()
        if code and not self.has_failed:
            tail = read_part(self._log, _TAIL_BYTES, is_end=True).decode("utf-8", "replace")
            word, _, reason = (tail.splitlines() or [""])[-1].partition(" ")
            self._fail(reason if word == FAILED else f"its process ended with code {code}")

    def _fail(self, reason: str) -> None:
        self.has_failed = True
        self._notify(
            f"tracker {label(self._name)} failed, and the run is not affected: {reason}\n"
            f"  log: {self._log}\n"
            f"  send the rest later: samebits track {shlex.quote(str(self._run))} --to {shlex.quote(self._name)}"
        )

    def end(self, outcome: Outcome) -> None:
        """Report the end of the run to the tracker."""
        assert self._child.stdin is not None
        self._ended = time.monotonic()
        with contextlib.suppress(OSError):  # it has ended
            self._child.stdin.write(f"{outcome}\n".encode())
            self._child.stdin.close()

    def close(self, *, is_patient: bool = False) -> None:
        """Wait for the process while it stores records, or `is_patient` until it ends; kill it if it hangs."""
        stored_at = self._stored_at()
        quiet_since = self._ended
        while self._watcher.is_alive() and not is_patient:
            self._watcher.join(0.2)
            now = time.monotonic()
            if self._stored_at() != stored_at:
                stored_at = self._stored_at()
                quiet_since = now
            is_started = stored_at != self._stored_before
            end = quiet_since + _HANG_S
            end = end if is_started else max(end, self._began + _START_S)
            if self._watcher.is_alive() and now > min(end, self._ended + _MOST_S):
                self._fail("it hangs" if is_started else "it has not started")
                end_group(self._child.pid)
                break
        self._watcher.join()

    def _stored_at(self) -> int:
        """Return when the tracker has last stored records of any run in this folder, nanoseconds; 0 if never."""
        try:
            return (self._run / FOLDER / f"{label(self._name)}.json").stat().st_mtime_ns
        except OSError:
            return 0
