"""Main function of each worker process: runs the entry, and reports its end to the launcher."""

import gc
import json
import multiprocessing
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from samebits.cluster import abort, signals
from samebits.cluster.connecting import is_lost_peer
from samebits.cluster.env import KEY, LAUNCHED, RankAssignment, read_assignment
from samebits.cluster.signals import STOP_SIGNALS, when_parent_dies
from samebits.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HangError,
    LaunchError,
    ReaderLost,
    SamebitsError,
    SampleError,
)
from samebits.launch.failures import ErrorReport
from samebits.open_files import explained

STOP_FILE = "stop"


@dataclass(frozen=True)
class WorkerResult:
    """How a worker ended that did not fail."""

    code: int  #: Exit code for the command, if the entry returned a number.
    was_stop_requested: bool  #: This process received the stop signal; otherwise it stopped because another one did.


def run_worker(
    entry: Callable[..., object],
    args: tuple[Any, ...],
    folder: Path,
    stop_timeout_s: float,
    key: str,
    failure_path: Path,
) -> WorkerResult:
    """Run `entry(*args)`, report every kind of end to the launcher, and return the end if it has not failed.

    Args:
        entry: The work; reads its rank from the environment.
        folder: The launcher's; contains a file called stop once all workers shall stop.
        stop_timeout_s: How long it may continue after the launcher has died, seconds.
    """
    if multiprocessing.parent_process() is not None:
        gc.freeze()  # what the fork server has imported; see `cleanup`
    gc.enable()
    # A terminal or scheduler sends these to the whole job; the launcher forwards them as SIGTERM.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # They are blocked where the fork server could not import `cleanup`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # A stop signal sent before the lines above was lost.
    if (folder / STOP_FILE).exists():
        return WorkerResult(0, True)
    os.environ[LAUNCHED] = "1"
    os.environ[KEY] = key
    here = read_assignment(os.environ)
    assert here is not None, "the launcher sets the world's variables"
    # Opened early: if no more files can be opened later, that must still be reported.
    try:
        report = failure_path.with_suffix(".part").open("w", encoding="utf-8")
    except FileNotFoundError:  # the launcher has ended already
        return WorkerResult(0, True)
    is_finished = is_orphan = False

    def orphaned() -> None:
        nonlocal is_orphan
        is_orphan = True
        if is_finished:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(stop_timeout_s)
        os._exit(1)

    when_parent_dies(orphaned)
    abort.notify_with(lambda error: _fail(report, here, error))
    abort.record_with(lambda error: _report(report, here, explained(error)))
    code: object = 0
    try:
        code = entry(*args)
    except SystemExit as error:
        if error.code not in (None, 0):
            _fail(report, here, error)
    except BaseException as error:
        _fail(report, here, error)
    # From here on it only waits for the others.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_finished = True
    abort.flush()
    if is_orphan:
        os._exit(0)
    return WorkerResult(code if isinstance(code, int) else 0, signals.was_stop_requested)


def _fail(file: IO[str], here: RankAssignment, error: BaseException) -> None:
    error = explained(error)
    _report(file, here, error)
    abort.flush()
    # Not sys.exit: destroying a process group whose peers have ended may block.
    os._exit(_exit_code(error))


def _report(file: IO[str], here: RankAssignment, error: BaseException) -> None:
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    if file.closed:  # keep the first error: a later one may be its consequence
        return
    is_user_error = isinstance(error, SamebitsError)
    is_debug = os.environ.get("SAMEBITS_DEBUG") == "1"
    # Settings, data and files of a single machine are wrong for all of its ranks alike, so the rank is not shown.
    is_same_for_all = isinstance(error, (ConfigError, DataError, CheckpointError))
    if isinstance(error, SamebitsError) and not (
        is_same_for_all and here.local_world_size == here.world_size
    ):
        _add_rank(error, here)
    report = ErrorReport(
        time=time.time(),
        text=str(error)
        if is_user_error and not is_debug
        else "".join(traceback.format_exception(error)).rstrip(),
        exit_code=_exit_code(error),
        is_user_error=is_user_error,
        is_consequence=not isinstance(error, HangError)
        and (isinstance(error, LaunchError) or is_lost_peer(error)),
        may_pass=isinstance(error, (LaunchError, ReaderLost, SampleError)) or not is_user_error,
        culprits=error.ranks if isinstance(error, HangError) else (),
    )
    # The folder is removed with the launcher; then no process reads the report.
    with suppress(OSError):
        file.write(json.dumps(asdict(report)))
        file.close()
        part = Path(file.name)
        part.rename(part.with_suffix(".json"))


def _add_rank(error: SamebitsError, here: RankAssignment) -> None:
    """Add this rank to the error's `where`, unless the error names the ranks at fault: all ranks may raise it."""
    where = error.slots.get("where", "")
    if re.search(r"^rank \d+ \(host ", where, re.MULTILINE):
        return
    rank = f"rank {here.rank} (host {socket.gethostname()}, pid {os.getpid()})"
    error.slots["where"] = "\n".join(filter(None, [where, rank]))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SamebitsError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code & 0xFF or 1
    return 1
