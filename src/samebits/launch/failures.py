"""Root cause analysis: which of several failed processes failed first, and the error for the user.

A process that fails takes its peers with it, because they see closed connections. Only the first failure is useful:

    rank 2  killed (SIGKILL) ──┐ connection closed
    rank 0                     ├── RuntimeError: closed by peer  (consequence)
    rank 1                     └── RuntimeError: closed by peer  (consequence)   -> root cause: rank 2

Time alone does not decide: a peer may report the lost connection before the failed rank has written its own report.
The kind of failure comes first (see `root_cause`), and time decides among failures of one kind. Nothing here imports
torch.
"""

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import LaunchError

# What helps after a lost process of a run.
RESUME = "Resume with --resume auto; --max-restarts N restarts a run automatically."


@dataclass(frozen=True)
class ErrorReport:
    """A worker's report of its own failure, written as JSON for the launcher."""

    time: float  #: Seconds since 1970.
    text: str  #: The error's text, or a traceback.
    exit_code: int  #: Exit code for the command.
    is_user_error: bool  #: The text is written for users: a SamebitsError.
    is_consequence: bool  #: It looks like the loss of another process.
    may_pass: bool  #: A restart may succeed.
    culprits: Sequence[int] = ()  #: Ranks that the error blames, if any.


@dataclass(frozen=True)
class ProcessFailure:
    """One process that ended before its work was done."""

    rank: int  #: Its rank.
    pid: int  #: Its process id.
    exit_code: int  #: Its exit code, or minus the signal's number.
    report: ErrorReport | None  #: Its own report; None if it wrote none.
    killed_by_launcher: bool = False  #: The launcher killed it after another process had failed.


@dataclass(frozen=True)
class RootCause:
    """The first failure of a world, as reported to the user."""

    text: str  #: The error text.
    exit_code: int  #: Exit code for the command.
    may_pass: bool  #: A restart may succeed.
    is_elsewhere: bool = False  #: All processes of this node only lost one on another node.


def root_cause(process_failures: Sequence[ProcessFailure]) -> ProcessFailure:
    """Select the failure that caused the others.

    A killed process comes before reported errors; among errors, the earliest that does not report a lost peer. An abort
    ranks lower, because NCCL's watchdog aborts ranks that have lost a peer. A process that the launcher killed counts
    only if it had reported an error of its own before.
    """

    def order(failure: ProcessFailure) -> tuple[int, float]:
        report = failure.report
        # A late peer hangs in a collective: the launcher's SIGKILL is a consequence as well.
        if failure.killed_by_launcher and (report is None or report.is_consequence):
            return (4, 0.0)
        if report is not None:
            return (3 if report.is_consequence else 1, report.time)
        # No report: 0 is a kill from outside (kill -9, out of memory), 2 an abort or a silent exit.
        return (0 if failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT else 2, 0.0)

    # min keeps the first of equals: the lowest rank.
    return min(process_failures, key=order)


def explain(
    failure: ProcessFailure, host: str, out_of_memory: str = "", fix: str = RESUME
) -> RootCause:
    """Turn a failure into the error text for the user; `out_of_memory`: the kernel's message about memory, if any."""
    name = f"rank {failure.rank} (host {host}, pid {failure.pid})"
    report = failure.report
    # The worker's text is final: it contains the rank, and must not be wrapped into a second error.
    if report is not None and report.is_user_error:
        return RootCause(report.text, report.exit_code, report.may_pass, report.is_consequence)
    if report is not None:
        text = f"{name} failed:\n{report.text}"
        return RootCause(text, report.exit_code, report.may_pass, report.is_consequence)
    # Negative: ended by a signal. Neither the process nor Python could write a report then.
    if failure.exit_code < 0:
        error = LaunchError(
            f"{name} was killed by signal {-failure.exit_code} ({signal_name(-failure.exit_code)})",
            cause=_likely_cause(-failure.exit_code, out_of_memory),
            fix=fix,
        )
        return RootCause(str(error), error.exit_code, True)
    error = LaunchError(
        f"{name} ended without an error message, with exit code {failure.exit_code}",
        cause="the recipe or a library has called exit",
        fix="Search the recipe and its imports for exit calls.",
    )
    return RootCause(str(error), failure.exit_code or error.exit_code, True)


def signal_name(number: int) -> str:
    """Return a signal's name; "unknown" for one without a name, such as most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _likely_cause(number: int, out_of_memory: str) -> str:
    if number == signal.SIGKILL:
        return out_of_memory or "kill -9 by a user or scheduler, or out of memory (see dmesg)"
    if number == signal.SIGBUS:
        return "shared memory is full: df -h /dev/shm (in a container: --shm-size)"
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return "a fault in native code; its stack trace, if there is one, is above"
    return ""


def count_memory_kills() -> int:
    """Return how many processes of this container the kernel has killed for lack of memory; 0 if unknown."""
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def out_of_memory(pid: int, kills_before: int) -> str:
    """Return the kernel's evidence of a kill for lack of memory since `count_memory_kills`; empty if there is none."""
    if re.search(rf"Killed process {pid}\b", _kernel_log()):
        return f"out of memory: the kernel's log names pid {pid}"
    # In a container the kernel's log is often not readable, but the cgroup's counter is.
    if count_memory_kills() > kills_before:
        return "out of memory: the kernel has killed a process of this container for it"
    return ""


def _kernel_log() -> str:
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        # Non-blocking: a read at the end of the kernel's log would wait for its next record.
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            # Each read returns one record, until there is none (which raises).
            while record := os.read(handle, 8192):
                lines.append(record)
        finally:
            os.close(handle)
    return b"\n".join(lines).decode(errors="replace")
