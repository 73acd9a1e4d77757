"""The first import of the fork server, which outlives launcher and workers for a moment, and removes their files.

The launcher removes its temporary files itself; this covers a launcher that was killed. Nothing here imports torch.
"""

import atexit
import gc
import os
import signal
import sys
from pathlib import Path

from samebits import scratch
from samebits.cluster.signals import STOP_SIGNALS

VARIABLE = "SAMEBITS_TEMP"
SAFE_PATH = "PYTHONSAFEPATH"
SAFE_PATH_VALUE = "samebits"  # any non-empty text works; this one shows that the launcher set it


def sweep(folder: Path) -> None:
    """Remove a launcher's temporary folder, and end this process."""
    # Removes only a folder that a launcher made, and only if that launcher has ended.
    scratch.sweep_one(folder)
    # Python's shutdown with torch loaded takes seconds on a busy machine, and no process reads this exit code.
    os._exit(0)


def is_fork_server(arguments: list[str]) -> bool:
    """Return whether multiprocessing started this process as a fork server, by its command line."""
    return "-c" in arguments and any(
        "multiprocessing.forkserver import main" in each for each in arguments
    )


if is_fork_server(sys.orig_argv):
    # Importing torch creates millions of objects and no garbage: collections take a fifth of its time. Workers collect
    # again, but never these objects (`run_worker`).
    gc.disable()
    # Processes forked from the fork server exit without atexit handlers.
    # Removed from the environment: processes that a recipe starts must not take this folder for theirs.
    if folder := os.environ.pop(VARIABLE, ""):
        atexit.register(sweep, Path(folder))
    # The launcher started this process with these signals blocked, as only the launcher handles them. Now they are
    # ignored.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    # Meant for this process only: scripts that a recipe starts must find modules beside them, as usual.
    if os.environ.get(SAFE_PATH) == SAFE_PATH_VALUE:
        del os.environ[SAFE_PATH]
