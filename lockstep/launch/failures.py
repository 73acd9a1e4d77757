"""Why a world ended: which of several dead processes was the first cause, and what to tell people.

One process that fails takes its peers with it: they see closed connections. Only the first cause is of use.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LaunchError


@dataclass(frozen=True)
class ErrorReport:
    """What a worker says of its own failure.

    Attributes:
        time: When, in seconds since 1970.
        text: An error's text, or a traceback.
        exit_code: What the command shall exit with.
        is_user_error: The text is made for people: a LockstepError.
        is_consequence: It looks like the loss of another process.
        may_pass: The same work may well succeed when it is started again.
        culprits: Ranks that it blames, if any.
    """

    time: float
    text: str
    exit_code: int
    is_user_error: bool
    is_consequence: bool
    may_pass: bool
    culprits: Sequence[int] = ()


@dataclass(frozen=True)
class ProcessFailure:
    """One process that has ended before the work was done.

    Attributes:
        rank: Its rank.
        pid: Its process id.
        exit_code: Its exit code, or minus the signal's number.
        report: What it said itself, if it could.
        killed_by_launcher: The launcher killed it after another one had died.
    """

    rank: int
    pid: int
    exit_code: int
    report: ErrorReport | None
    killed_by_launcher: bool = False


@dataclass(frozen=True)
class RootCause:
    """What to tell, and what to do about it.

    Attributes:
        text: For people.
        exit_code: What the command shall exit with.
        may_pass: The same work may well succeed when it is started again.
        is_elsewhere: All processes here only lost one on another machine.
    """

    text: str
    exit_code: int
    may_pass: bool
    is_elsewhere: bool = False


def root_cause(process_failures: Sequence[ProcessFailure]) -> ProcessFailure:
    """The failure that the others follow from.

    A process that was killed comes before errors; among errors the earliest that does not speak of a lost peer. An
    abort counts less: NCCL's watchdog aborts the ranks that have lost one. A process that the launcher has killed
    counts where it had already reported an error of its own.
    """

    def order(failure: ProcessFailure) -> tuple[int, float]:
        report = failure.report
        if failure.killed_by_launcher and (report is None or report.is_consequence):
            return (4, 0.0)
        if report is not None:
            return (3 if report.is_consequence else 1, report.time)
        return (0 if failure.exit_code < 0 and failure.exit_code != -signal.SIGABRT else 2, 0.0)

    return min(process_failures, key=order)


def explain(failure: ProcessFailure, host: str, out_of_memory: str = "") -> RootCause:
    """Put a failure into words.

    Args:
        failure: The first cause.
        host: This machine's name.
        out_of_memory: What the kernel says about memory, if it does.
    """
    who = f"rank {failure.rank} (host {host}, pid {failure.pid})"
    report = failure.report
    if report is not None and report.is_user_error:
        return RootCause(report.text, report.exit_code, report.may_pass, report.is_consequence)
    if report is not None:
        text = f"{who} failed:\n{report.text}"
        return RootCause(text, report.exit_code, report.may_pass, report.is_consequence)
    if failure.exit_code < 0:
        error = LaunchError(
            f"{who} was killed by signal {-failure.exit_code} ({_signal_name(-failure.exit_code)})",
            cause=_likely_cause(-failure.exit_code, out_of_memory),
        )
        return RootCause(str(error), error.exit_code, True)
    error = LaunchError(f"{who} ended without a word, with exit code {failure.exit_code}")
    return RootCause(str(error), failure.exit_code or error.exit_code, True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _likely_cause(number: int, out_of_memory: str) -> str:
    if number == signal.SIGKILL:
        return out_of_memory or "somebody's kill -9, or out of memory (the kernel's log, if you may read it: dmesg)"
    if number == signal.SIGBUS:
        return "shared memory is full: df -h /dev/shm (in a container: --shm-size)"
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return "a fault in native code; its stack is above, if it could write one"
    return ""


def count_memory_kills() -> int:
    """How many processes the kernel has killed in this container for want of memory; 0 if it can't be known."""
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def out_of_memory(pid: int, kills_before: int) -> str:
    """What the kernel says about memory and a process that was killed; empty if nothing."""
    if re.search(rf"Killed process {pid}\b", _kernel_log()):
        return f"out of memory: the kernel's log names pid {pid}"
    if count_memory_kills() > kills_before:
        return "out of memory: the kernel has killed a process of this container for it"
    return ""


def _kernel_log() -> str:
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        try:
            # One record a read, until there is none (which raises).
            while record := os.read(handle, 8192):
                lines.append(record)
        finally:
            os.close(handle)
    return b"\n".join(lines).decode(errors="replace")
