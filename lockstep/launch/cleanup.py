"""Imported by the fork server, which outlives the launcher and its workers by a moment, and then sweeps up.

The launcher removes its temporary files itself; this is for a launcher that was killed. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
from pathlib import Path

from lockstep import scratch

# A terminal and a scheduler send these to every process of a job; only the launcher answers to them.
LAUNCHER_ONLY = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
VARIABLE = "LOCKSTEP_TEMP"
SAFE_PATH = "PYTHONSAFEPATH"
SAFE_PATH_VALUE = "lockstep"  # any text but the empty one counts; this one tells that the launcher set it


def _sweep(folder: Path) -> None:
    # Checks by itself that the folder was made by a launcher of ours, and that the launcher is dead.
    scratch.sweep_one(folder)
    # Taking torch apart would keep the process for seconds on a busy machine. Nobody reads a fork server's exit code.
    os._exit(0)


def is_fork_server(arguments: list[str]) -> bool:
    """Whether this process was started by multiprocessing as a fork server, by the words it was started with."""
    return "-c" in arguments and any("multiprocessing.forkserver import main" in word for word in arguments)


if is_fork_server(sys.orig_argv):
    # What is forked from the fork server leaves without this.
    if folder := os.environ.pop(VARIABLE, ""):
        atexit.register(_sweep, Path(folder))
    # They came blocked, as the launcher that started this process alone answers to them. Now they are ignored.
    for number in LAUNCHER_ONLY:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHER_ONLY)
    # It was for this process. Scripts that a recipe starts find what is beside them, as always.
    if os.environ.get(SAFE_PATH) == SAFE_PATH_VALUE:
        del os.environ[SAFE_PATH]
