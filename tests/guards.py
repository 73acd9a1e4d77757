"""Checks that a test leaves the machine as it was.

Each guard is a pair: `look()` before the test, `left(before)` after it, which puts things right and returns what
was wrong, so that one bad test fails itself and not the ones behind it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil

# Set by libraries when they are first imported, for their own use.
_LIBRARIES_SET = (
    "PYTEST_", "KMP_", "TORCH", "TF_", "GRPC_", "COLUMNS", "LINES", "CUDA_MODULE_LOADING", "LD_LIBRARY_PATH",
)  # fmt: skip
# Folders in which tools keep what they like, beside those whose name begins with a dot.
_TOOLS_FOLDERS = {"__pycache__", "build", "dist"}
# People write these while tests run; a run leaves records, weights and folders.
_PEOPLE_WRITE = {".py", ".md", ".toml", ".ini", ".cfg", ".txt", ".lock", ".swp", ""}
# Linux lists a process's children there, if its kernel was built so.
_CHILDREN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
# How long something on its way out may take.
_GRACE_S = float(os.environ.get("GUARDS_GRACE_S", "20"))


class Environment:
    """`os.environ` and the working directory."""

    def look(self) -> tuple[dict[str, str], str]:
        return dict(os.environ), os.getcwd()

    def left(self, before: tuple[dict[str, str], str]) -> list[str]:
        variables, cwd = before
        problems = []
        for name in sorted(set(variables) | set(os.environ)):
            if variables.get(name) == os.environ.get(name) or name.startswith(_LIBRARIES_SET):
                continue
            problems.append(f"environment variable {name}: {variables.get(name)!r} became {os.environ.get(name)!r}")
            if name in variables:
                os.environ[name] = variables[name]
            else:
                del os.environ[name]
        if os.getcwd() != cwd:
            problems.append(f"working directory {cwd} became {os.getcwd()}")
            os.chdir(cwd)
        return problems


class Signals:
    """Python's handlers of the signals that a run answers to."""

    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

    def look(self) -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in self.watched}

    def left(self, before: dict[signal.Signals, Any]) -> list[str]:
        problems = []
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                problems.append(f"handler of {number.name}: {handler} became {signal.getsignal(number)}")
                signal.signal(number, handler)
        return problems


class Torch:
    """A process group left open is a fault; settings that change bits are put back without a word."""

    def look(self) -> int:
        """Number of threads, 0 while torch is not imported."""
        # A fixture of a wider scope may have trained in this process since the last test.
        self._restore()
        torch = _torch()
        return torch.get_num_threads() if torch else 0

    def left(self, before: int) -> list[str]:
        self._restore()
        torch = _torch()
        if torch is None:
            return []
        if before:
            torch.set_num_threads(before)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
            return ["a torch process group"]
        return []

    def _restore(self) -> None:
        torch = _torch()
        if torch is None:
            return
        # Not called for nothing: it imports torch's compiler.
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def _torch() -> Any:
    """The torch that a test has imported; None where it is not, or only in part."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "distributed") and hasattr(torch, "get_num_threads") else None


class Threads:
    """Python threads that still run."""

    def look(self) -> set[threading.Thread]:
        return set(threading.enumerate())

    def left(self, before: set[threading.Thread]) -> list[str]:
        def still() -> list[threading.Thread]:
            new = [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]
            # torch's ONNX exporter shows a bar of tqdm, where that is installed; its thread stays for the next bar.
            return [thread for thread in new if thread.name != "tqdm_monitor"]

        _wait_until(lambda: not still())
        return [f"thread {thread.name}" for thread in still()]


# Processes that a fixture of a wider scope keeps, and may start again during a test.
KEPT: set[int] = set()


class Processes:
    """Processes below this one, also those whose parent is gone: on Linux they come to us as the subreaper."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER; other systems lose sight of orphans

    def look(self) -> set[int]:
        return set(_descendants(os.getpid()))

    def left(self, before: set[int]) -> list[str]:
        _wait_until(lambda: not list(self._running(before)))
        problems = []
        for process in self._running(before):
            with contextlib.suppress(psutil.NoSuchProcess):
                problems.append(f"process {process.pid}: {' '.join(process.cmdline())[:120]}")
                process.kill()
        return problems

    def _running(self, before: set[int]) -> Iterator[psutil.Process]:
        known = before | KEPT | _kept_by_python()
        for pid in _descendants(os.getpid()):
            if pid in known:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def _descendants(pid: int) -> Iterator[int]:
    """All processes below one. psutil would read the status of every process of the machine, three times a test."""
    if not _CHILDREN.exists():
        yield from (process.pid for process in psutil.Process(pid).children(recursive=True))
        return
    # A thread or process may end between being listed and being read.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split():
                    yield int(child)
                    yield from _descendants(int(child))


class Files:
    """Files and folders in the checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def look(self) -> set[str]:
        if not self._is_as_seen():
            _seen.clear()
            _walked.clear()
            _seen[self.root] = set(self._walk(str(self.root), deep=True))
        return _seen[self.root]

    def _is_as_seen(self) -> bool:
        # A walk costs several times as much as the times of the folders, and few tests change any.
        try:
            return self.root in _seen and all(os.stat(path).st_mtime_ns == _listed[path][0] for path in _walked)
        except (FileNotFoundError, KeyError):
            return False

    def left(self, before: set[str]) -> list[str]:
        new = sorted(self.look() - before)
        return [f"file {path}" for path in new if os.path.splitext(path)[1] not in _PEOPLE_WRITE or _is_folder(path)]

    def _walk(self, folder: str, deep: bool) -> Iterator[str]:
        _walked.add(folder)
        with contextlib.suppress(FileNotFoundError):
            paths, folders = _list(folder)
            yield from paths
            for path in folders if deep else ():
                # Of runs/ and data/ the names at the top will do: they can hold very many files.
                yield from self._walk(path, deep=os.path.basename(path) not in ("runs", "data", "logs"))


# What the last walk found below a root, and the folders that it went through.
_seen: dict[Path, set[str]] = {}
_walked: set[str] = set()
# Folders with their times of change, files and folders.
_listed: dict[str, tuple[int, list[str], list[str]]] = {}
_TICK_NS = 1_000_000_000  # longer than the steps of a file system's clock


def _list(folder: str) -> tuple[list[str], list[str]]:
    """What is in a folder, and which of it are folders. It is read again only when it has changed."""
    changed = os.stat(folder).st_mtime_ns
    if folder in _listed and _listed[folder][0] == changed:
        return _listed[folder][1:]
    now, paths, folders = time.time_ns(), [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name in _TOOLS_FOLDERS or name.startswith(".") or name.endswith((".egg-info", ".pyc", "~")):
                continue
            paths.append(entry.path)
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
    _listed.pop(folder, None)
    if changed < now - _TICK_NS:
        _listed[folder] = changed, paths, folders
    return paths, folders


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not any(name.endswith(".py") for name in os.listdir(path))


def _kept_by_python() -> set[int | None]:
    """multiprocessing starts these once and keeps them until this process ends."""
    return {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }


def _wait_until(done: Callable[[], bool], limit_s: float = _GRACE_S) -> None:
    end = time.monotonic() + limit_s
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
