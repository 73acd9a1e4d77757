"""Temporary folders and partial files: whose they are, and the only recursive delete of the package (ADR 23).

A scratch folder has a random name from `mkdtemp` and an owner file, which its process holds locked for as long as it
lives. A folder whose owner file is not locked was left by a process that was killed, and may be swept by another
process of the same user on the same machine. Nothing else is ever deleted recursively: no path that a user gave.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

PREFIX = ".lockstep-"
# Made by multiprocessing's mkdtemp; it holds the sockets of a launcher and its processes.
LAUNCHER_PREFIX = "pymp-"
OWNER = "lockstep.owner"
SHARED_MEMORY = Path("/dev/shm")

# Owner files of this process: open, hence locked, until it ends.
_held: dict[Path, int] = {}


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent` for this process alone, removed with all that is in it when the block ends.

    Raises:
        OSError: It can't be made.
    """
    sweep(parent)
    # From Python 3.12 on mkdtemp gives an absolute path, also in a parent that is named by a relative one.
    folder = parent / Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).name
    try:
        claim(folder)
        yield folder
    finally:
        release(folder)


def claim(folder: Path) -> None:
    """Mark a folder that `mkdtemp` has just made as this process's own. A second call changes nothing."""
    if folder in _held:
        return
    partial = folder / f"{OWNER}.new"
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    # Where there are no locks, nobody can tell whether this process lives, so nobody sweeps the folder.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(handle, json.dumps(_this_machine()).encode())
    partial.rename(folder / OWNER)  # locked before it can be found
    _held[folder] = handle


def release(folder: Path) -> None:
    """Remove a scratch folder of this process. What can't be removed is left to `sweep`."""
    if is_scratch(folder):
        _remove(folder)
    handle = _held.pop(folder, None)
    if handle is not None:
        os.close(handle)


def sweep(parent: Path) -> None:
    """Remove what processes of this user left in a folder when they were killed."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith((PREFIX, LAUNCHER_PREFIX)):
                sweep_one(Path(entry.path))


def sweep_one(folder: Path) -> None:
    """Remove a scratch folder, and the semaphores named after it, if the process that made it is dead."""
    if not is_scratch(folder):
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
            for path in semaphores(folder):
                path.unlink()
            _remove(folder)
        finally:
            os.close(handle)


def semaphores(folder: Path) -> list[Path]:
    """The named semaphores of a launcher's folder: `launch/forkserver.py` names them so."""
    if not folder.name.startswith(LAUNCHER_PREFIX):
        return []
    named = re.compile(rf"sem\.{re.escape(folder.name)}-\w+")
    try:
        with os.scandir(SHARED_MEMORY) as entries:
            return [Path(entry.path) for entry in entries if named.fullmatch(entry.name) and _is_own_file(entry.path)]
    except OSError:
        return []


def is_scratch(folder: Path) -> bool:
    """Whether a folder is proven to be a scratch folder that a process of this user made on this machine."""
    try:
        status = os.lstat(folder)
        is_named = folder.name.startswith((PREFIX, LAUNCHER_PREFIX))
        if not (is_named and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()):
            return False
        owner = folder / OWNER
        return _is_own_file(owner) and json.loads(owner.read_bytes()[:4096]) == _this_machine()
    except (OSError, ValueError):
        return False


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what is left is swept another time


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Remove files of these names, then the folder if nothing else is in it; of a symbolic link the link alone."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def partial_path(path: Path) -> Path:
    """Where to write a file before it gets its name: beside it, under a name that tells which process writes."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_host()}.partial")


def sweep_partials(folder: Path, name: str = "") -> None:
    """Remove partial files that killed processes of this user and host left in a folder.

    Args:
        folder: Where they are.
        name: Only those of this file; if left out, of all.
    """
    which = re.escape(name) or ".+"
    pattern = re.compile(rf"\.{which}\.(\d+)-{_host()}\.partial", re.DOTALL)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = pattern.fullmatch(entry.name)
            if match and not is_running(int(match[1])) and _is_own_file(entry.path):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def is_running(pid: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the number may come from another program
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):  # a process that has ended keeps its number until its parent reads its end
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return True


def _is_own_file(path: str | Path) -> bool:
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


@cache
def _host() -> str:
    """A short name for what process ids count in: this host, or this container of it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{os.uname().nodename} {space}".encode()).hexdigest()[:8]


@cache
def _this_machine() -> dict[str, str]:
    """A lock on a shared disk may hold on one machine only, so another machine's folders are left alone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return {"host": os.uname().nodename, "boot": boot}
