"""The state of a run, from its lock and its logs: running, stopped, failed or done. Nothing is locked or written."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from samebits.run_views.events import last_of_rank0, read_launcher_log
from samebits.run_views.files import read_part
from samebits.scratch import is_running
from samebits.storage.run_lock import LOCK, OWNER

# The last two are states of the trials of a sweep.
State = Literal["running", "stopped", "failed", "done", "waiting", "pruned"]

# On another host, whose processes are not visible from here: since a run writes records and logs, but not during an
# evaluation, which may take long.
_SILENT_S = 3600.0
_RESTART_S = 120.0  # between the end of the processes and the lock of the restarted rank 0
_TAIL_BYTES = 16 * 1024
_HOLDER = re.compile(r"process (\d{1,10}) on (.{1,255})")
_WRITTEN = ("metrics.jsonl", "logs/rank-0.log", "logs/launcher.log", LOCK)


def state_of(run: Path, *, is_complete: bool) -> tuple[State, str]:
    """Return the state of a run, and for a failed run the reason, as far as its logs have one.

    A run is complete if it has a `result.json`.
    """
    if is_complete:
        return "done", ""
    holder = _holder(run)
    if holder is not None and _lives(run, *holder):
        return "running", ""
    launcher = read_launcher_log(run, _TAIL_BYTES)
    if launcher and launcher[-1].kind == "restart" and time.time() - launcher[-1].at < _RESTART_S:
        return "running", ""
    last, fault = last_of_rank0(run), next((event for event in reversed(launcher) if event.kind == "fault"), None)
    if fault is not None and (last is None or last.kind == "fault" or last.at <= fault.at):
        return "failed", fault.title
    if last is not None and last.kind == "fault":
        return "failed", last.title
    if holder is not None:  # a process that ends in an orderly way empties the file
        return "failed", f"process {holder[0]} on {holder[1]} was killed"
    return "stopped", ""


def newest_write(run: Path) -> float:
    """Return the Unix time at which a run last wrote a record or a log; 0 if it has none."""
    times = [0.0]
    for name in _WRITTEN:
        with suppress(OSError):
            times.append(os.stat(run / name).st_mtime)
    return max(times)


def _holder(run: Path) -> tuple[int, str] | None:
    """Return process id and host of the process that holds the lock, or held it when it was killed."""
    for name in (LOCK, OWNER):
        content = read_part(run / name, 512, is_end=False).decode("utf-8", "replace").strip()
        if match := _HOLDER.fullmatch(content):
            return int(match[1]), match[2]
    return None


def _lives(run: Path, pid: int, host: str) -> bool:
    if host != os.uname().nodename:
        return time.time() - newest_write(run) < _SILENT_S
    if not is_running(pid):
        return False
    with suppress(psutil.Error, OSError):
        # Another process may have got the number. The one that took the lock started before it wrote the file.
        return float(psutil.Process(pid).create_time()) < os.stat(run / LOCK).st_mtime + 60.0
    return True
