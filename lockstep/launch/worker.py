"""What runs in each process that the launcher starts, around the entry that does the work."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.cluster import abort, signals
from lockstep.cluster.env import KEY, LAUNCHED, RankAssignment, read_assignment
from lockstep.cluster.peer_errors import is_lost_peer
from lockstep.cluster.signals import when_parent_dies
from lockstep.errors import CheckpointError, ConfigError, DataError, HangError, LaunchError, LockstepError, ReaderLost
from lockstep.launch.failures import ErrorReport
from lockstep.launch.forkserver import LAUNCHER_ONLY
from lockstep.open_files import explained

STOP_FILE = "stop"


@dataclass(frozen=True)
class WorkerResult:
    """How the work of a process ended, where it did not fail.

    Attributes:
        code: What the command shall exit with, as the entry says where it returns a number.
        was_stop_requested: This process was told to stop; otherwise it stopped with another one.
    """

    code: int
    was_stop_requested: bool


def run_worker(
    entry: Callable[..., object], args: tuple[Any, ...], folder: Path, stop_timeout_s: float, key: str = ""
) -> WorkerResult:
    """Run `entry(*args)` so that its end, of whatever kind, is known to the launcher.

    Args:
        entry: The work; learns its rank from the environment.
        args: What it gets.
        folder: Where to report a failure; holds a file called stop if everybody shall stop.
        stop_timeout_s: How long it may go on after the launcher is dead.
        key: What the processes of the run sign with.

    Returns:
        What torch's agent hands to the launcher once all are done.
    """
    # These reach the whole process group, or all of a job; the launcher passes them on as SIGTERM.
    for number in LAUNCHER_ONLY:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Blocked where the fork server has not imported `sweep`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_ONLY)
    # A stop from before the line above went unheard.
    if (folder / STOP_FILE).exists():
        return WorkerResult(0, True)
    os.environ[LAUNCHED] = "1"
    os.environ[KEY] = key
    here = read_assignment(os.environ)
    assert here is not None, "the agent sets the world's variables"
    # Opened now: where no more files may be opened, that is what has to be reported.
    try:
        report = report_path(folder, here.rank, here.restart).with_suffix(".part").open("w", encoding="utf-8")
    except FileNotFoundError:  # the launcher is gone already
        return WorkerResult(0, True)
    state = {"finished": False, "orphan": False}

    def orphaned() -> None:
        state["orphan"] = True
        if state["finished"]:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(stop_timeout_s)
        os._exit(1)

    when_parent_dies(orphaned)
    abort.notify_with(lambda error: _fail(report, here, error))
    abort.record_with(lambda error: _report(report, here, error))
    code: object = 0
    try:
        code = entry(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            _fail(report, here, error)
    except BaseException as error:
        _fail(report, here, error)
    # From here on it only waits for the others; torch's agent ends it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    state["finished"] = True
    _flush()
    if state["orphan"]:
        os._exit(0)
    return WorkerResult(code if isinstance(code, int) else 0, signals.was_stop_requested)


def report_path(folder: Path, rank: int, restart: int) -> Path:
    """Where a rank writes why it failed."""
    return folder / f"rank-{rank}-{restart}.json"


def _fail(file: IO[str], here: RankAssignment, error: BaseException) -> None:
    error = explained(error)
    _report(file, here, error)
    _flush()
    # Not sys.exit: tearing down a process group whose peers are gone may hang.
    os._exit(_exit_code(error))


def _report(file: IO[str], here: RankAssignment, error: BaseException) -> None:
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    if file.closed:  # the first error stays: what follows it may be its consequence
        return
    ours = isinstance(error, LockstepError)
    # What was asked for, or lies on this one machine, is wrong for all of its ranks alike.
    is_everybodys = isinstance(error, (ConfigError, DataError, CheckpointError))
    if isinstance(error, LockstepError) and not (is_everybodys and here.local_world_size == here.world_size):
        error.slots.setdefault("rank", f"{here.rank} (host {socket.gethostname()}, pid {os.getpid()})")
    report = ErrorReport(
        time=time.time(),
        text=str(error) if ours else "".join(traceback.format_exception(error)).rstrip(),
        exit_code=_exit_code(error),
        is_user_error=ours,
        is_consequence=_is_consequence(error),
        may_pass=isinstance(error, (LaunchError, ReaderLost)) or not ours,
        culprits=error.ranks if isinstance(error, HangError) else (),
    )
    # The folder is gone where the launcher is; then nobody reads it.
    with suppress(OSError):
        file.write(json.dumps(asdict(report)))
        file.close()
        part = Path(file.name)
        part.rename(part.with_suffix(".json"))


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, LockstepError):
        return isinstance(error, LaunchError) and not isinstance(error, HangError)
    return is_lost_peer(error)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, LockstepError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A closed pipe is no reason to hide how the work ended.
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
