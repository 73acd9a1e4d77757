"""Start the trackers of a run on rank 0, one process each, and ends them with the run.

The training process hands nothing over: a tracker reads the records from the run folder. So a tracker that is slow,
hangs or fails costs no step, and loses no record. `samebits track RUN` sends later what it missed.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from samebits.report.trackers.process import FAILED, POLL_S, STARTED
from samebits.report.trackers.tracker import Outcome, check_trackers, external, label

# A tracker that has sent no sign of life for so long before the end of the run hangs.
_HANG_S = 10.0
# Longest start of a tracker, on a machine where the training leaves it little CPU time.
_START_S = 60.0
# At the end, a run waits for a silent tracker this fraction of its time, in these limits, seconds.
_SHARE = 0.01
_LEAST_S = 3.0
_MOST_S = 30.0


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
        self,
        name: str,
        run: Path,
        notify: Callable[[str], None],
        *,
        is_new: bool,
        is_patient: bool = False,
    ) -> None:
        self._name = name
        self._run = run
        self._notify = notify
        self._is_patient = is_patient
        self._began = self._last_sign = time.monotonic()
        self._ends = self._patience_s = 0.0
        self._is_started = False
        self.has_failed = False  #: Whether it failed or was killed.
        log = run / "logs" / f"tracker-{label(name)}.log"
        log.parent.mkdir(exist_ok=True)
        descriptor = os.open(
            log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        # -P: without it, -m puts the current folder first on sys.path, where a wandb.py of a stranger may lie.
        command = [sys.executable, "-P", "-m", "samebits.report.trackers.process", name, str(run)]
        with open(descriptor, "ab") as stderr:
            self._child = subprocess.Popen(
                [*command, *(["--new"] if is_new else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,  # a tracker's children end with it, and Ctrl-C reaches only the training
            )
        # A thread reads, since a pipe that no process empties would block a tracker that reports much.
        self._reader = threading.Thread(
            target=self._read, name=f"tracker-{label(name)}", daemon=True
        )
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            word, _, rest = line.decode(errors="replace").strip().partition(" ")
            self._last_sign = time.monotonic()
            self._is_started |= word == STARTED
            if word == FAILED:
                self._fail(rest)

    def _fail(self, reason: str) -> None:
        self.has_failed = True
        name = label(self._name)
        log = self._run / "logs" / f"tracker-{label(self._name)}.log"
        self._notify(
            f"tracker {name} failed, and the run is not affected: {reason}\n"
            f"  log: {log}\n"
            f"  send the rest later: samebits track {shlex.quote(str(self._run))} --to {shlex.quote(self._name)}"
        )

    def end(self, outcome: Outcome) -> None:
        """Report the end of the run to the tracker."""
        assert self._child.stdin is not None
        self._ends = time.monotonic()
        took_s = self._ends - self._began
        self._patience_s = min(
            _MOST_S, max(_LEAST_S, _SHARE * took_s if outcome == "done" else 0.0)
        )
        with contextlib.suppress(OSError):  # it has ended
            self._child.stdin.write(f"{outcome}\n".encode())
            self._child.stdin.close()

    def close(self) -> None:
        """Wait for the process while it works, kill it if it hangs, and release everything."""
        try:
            # WNOWAIT leaves the process as a zombie, so its number, and
            # that of its group, cannot be used again before the kill.
            while (
                os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            ):
                if not self._is_patient and time.monotonic() > self._deadline():
                    if not self.has_failed:
                        self._fail("it hangs" if self._is_started else "it has not started")
                    break
                time.sleep(0.05)
        finally:
            # With what is left of its process group, whose number is taken until `wait`.
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
                os.killpg(self._child.pid, signal.SIGKILL)
            code = self._child.wait()
        # After the kill: the pipe is closed in all processes that had it, so the reader ends.
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()
        if code and not self.has_failed:
            self._fail(f"its process ended with code {code}")

    def _deadline(self) -> float:
        if self._is_started and self._ends - self._last_sign > _HANG_S + POLL_S:
            return self._ends  # it hung before the run ended
        if not self._is_started:
            return max(self._ends + self._patience_s, self._began + _START_S)
        return min(max(self._ends, self._last_sign) + self._patience_s, self._ends + _MOST_S)
