"""The fork server: imports torch once, while the launcher still imports its own modules; workers are forked from it.

Nothing here imports torch.
"""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, process, resource_tracker, spawn, util
from pathlib import Path
from typing import Any

from samebits import scratch
from samebits.cluster.signals import STOP_SIGNALS
from samebits.launch import cleanup
from samebits.launch.kernels import VARIABLES

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# Modules that a worker needs.
PRELOAD = [
    "torch._dynamo",  # the first optimizer of a process imports it, which takes seconds
    "samebits.cli.main",
    "samebits.launch.worker",
    "samebits.engine.evaluate",
    "samebits.engine.loop",
    "samebits.recipes.catalog",
]

# A socket's path may have 104 to 108 bytes, and multiprocessing and torch add up to 45.
LONGEST_TMPDIR = 58

_prepared = False
# What a server that was started early has loaded its libraries with, until it is used.
_early: Mapping[str, str | None] | None = None


def prepare(preload: Sequence[str], num_threads: int = 1) -> None:
    """Start the fork server and let it import what every worker needs; returns at once.

    Only the first call has an effect; but a server that was started early with other variables is replaced.

    Args:
        preload: Modules to import there. A module that cannot be imported is left to the worker.
        num_threads: CPU threads of each worker; libraries read it from the environment when they are loaded.
    """
    global _prepared, _early
    if not _prepared or _early is not None:
        variables = dict.fromkeys(THREAD_VARIABLES, str(num_threads))
        # Libraries read their variables once, when they are loaded, so a server with others cannot be changed.
        if _early is not None and _early != _loaded_with(variables):
            _discard()
        _early = None
    if not _prepared:
        os.environ.update(variables)
        # torch prints a C++ stack trace for each connection that ends. Its library reads the level when it is loaded.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        multiprocessing.set_forkserver_preload([cleanup.__name__, "torch", *preload])
        _prepared = True
    # The order of a set of strings depends on the seed; it must be equal in all workers of all runs.
    hash_seed = os.environ.get("PYTHONHASHSEED", "0")
    # Set twice, because starting the tracker unblocks SIGINT and SIGTERM.
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        with (
            _variable(cleanup.VARIABLE, _temp_dir()),
            _start_variables(),
            _variable("PYTHONHASHSEED", hash_seed),
        ):
            start()


@contextmanager
def early() -> Iterator[None]:
    """Start the fork server before the settings are known, with their defaults. For work that imports torch here.

    Without a call of `prepare` in the block, the server is of no use and ended with it.
    """
    global _early
    if _prepared:
        yield
        return
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    prepare(PRELOAD)
    _early = _loaded_with(os.environ)
    try:
        yield
    finally:
        if _early is not None:
            _discard()
            _early = None
            for name, value in before.items():
                _set(name, value)


@contextmanager
def without_script() -> Iterator[None]:
    """Prevent processes started meanwhile from importing the main script, as multiprocessing makes them do.

    Their work is found in modules. A script without `if __name__ == "__main__"` would run again in each of them, and a
    script from standard input cannot be imported at all.
    """
    before = spawn.get_preparation_data

    def without(name: str) -> dict[str, Any]:
        return {
            key: value
            for key, value in before(name).items()
            if not key.startswith("init_main_from_")
        }

    # multiprocessing has no setting for it. Its preparation data names the main script to import.
    spawn.get_preparation_data = without
    try:
        yield
    finally:
        spawn.get_preparation_data = before


@contextmanager
def temp_folder() -> Iterator[Path]:
    """Create a folder that is removed once the launcher and all its workers have ended, however they end."""
    with scratch.scratch_folder(Path(_temp_dir())) as folder:
        yield folder


def _temp_dir() -> str:
    """Return Python's folder for the sockets of this process and its forks; the first call creates it.

    It is marked as Samebits's, so that the next start recognizes what a kill -9 left. Where TMPDIR is too long for a
    socket's path, the sockets are created in /tmp.
    """
    # multiprocessing keeps the folder's name here, and shares it with the processes that it starts.
    config: dict[str, Any] = vars(process.current_process())["_config"]
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TMPDIR:
        # tempfile has read TMPDIR into this variable, and reads it only once.
        tempfile.tempdir = "/tmp"
    try:
        if config.get("tempdir") is None:
            scratch.sweep(Path(tempfile.gettempdir()))
        folder = Path(util.get_temp_dir())
        scratch.claim(folder)
        return str(folder)
    finally:
        tempfile.tempdir = before


@contextmanager
def _start_variables() -> Iterator[None]:
    """Set the environment of the fork server and the resource tracker, both started as `python -c`."""
    # The tracker frees what a killed launcher left; a warning about that is of no use. -c would put the current folder
    # first on sys.path, where another user's torch.py may be. The fork server removes the variable again.
    safe_path = _variable(
        cleanup.SAFE_PATH, os.environ.get(cleanup.SAFE_PATH) or cleanup.SAFE_PATH_VALUE
    )
    warnings = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"])
    )
    with _blocked(STOP_SIGNALS), _variable("PYTHONWARNINGS", warnings), safe_path:
        yield


@contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block signals: a program started meanwhile inherits the block; this process receives them at the end.

    Ignoring them instead would lose a Ctrl-C of that moment. `cleanup` makes the fork server ignore what it inherits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _loaded_with(threads: Mapping[str, str]) -> Mapping[str, str | None]:
    """Return the variables that libraries read in a server which is started now with these threads."""
    return {
        **{name: threads.get(name) for name in THREAD_VARIABLES},
        **{name: os.environ.get(name) for name in VARIABLES},
    }


def _discard() -> None:
    """End the server, from which no process was forked; the next one may be started with other variables."""
    global _prepared
    # multiprocessing has no public way to end the server, only to start it.
    server = forkserver._forkserver
    if server._forkserver_pid is not None:  # type: ignore[attr-defined]
        os.kill(server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    server._stop()  # type: ignore[attr-defined]
    _prepared = False


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        _set(name, before)
