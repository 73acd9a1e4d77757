"""Temporary folders and partial files, with their owner, and the only recursive delete of the package (ADR 23).

A scratch folder has a random name from `mkdtemp` and an owner file, which its process keeps locked until it ends. A
folder whose owner file is not locked was left by a killed process, and another process of the same user on the same
machine removes it. Nothing else is deleted recursively, in particular no path that a user gave.
"""

import contextlib
import errno
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

import psutil

PREFIX = ".samebits-"
# Made by multiprocessing: contains the sockets of a launcher and its processes.
LAUNCHER_PREFIX = "pymp-"
OWNER = "samebits.owner"

# Owner files of this process: open and therefore locked until it ends.
_held: dict[Path, int] = {}


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder in `parent` for this process, and remove it with its content when the block ends.

    Raises:
        OSError: The folder cannot be made.
    """
    sweep(parent)
    # From Python 3.12 on, mkdtemp returns an absolute path even for a relative parent.
    folder = parent / Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)).name
    try:
        claim(folder)
        yield folder
    finally:
        release(folder)


def claim(folder: Path) -> None:
    """Make this process the owner of a folder that `mkdtemp` has just made. A second call has no effect."""
    if folder in _held:
        return
    partial = folder / f"{OWNER}.new"
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    # On file systems without locks no process can detect the owner's end, so the folder is never swept.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(handle, json.dumps(_this_machine()).encode())
    partial.rename(folder / OWNER)  # renamed when locked: no other process sees it unlocked
    _held[folder] = handle


def release(folder: Path) -> None:
    """Remove a scratch folder of this process. Files that cannot be removed are left to `sweep`."""
    if is_scratch(folder):
        _remove(folder)
    # After the removal: closing it releases the lock, and another process could sweep the folder meanwhile.
    handle = _held.pop(folder, None)
    if handle is not None:
        os.close(handle)


def sweep(parent: Path) -> None:
    """Remove scratch folders in a folder that killed processes of this user left behind."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith((PREFIX, LAUNCHER_PREFIX)):
                sweep_one(Path(entry.path))


def sweep_one(folder: Path) -> None:
    """Remove a scratch folder if its owner has ended."""
    if not is_scratch(folder):
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner lives
            _remove(folder)
        finally:
            os.close(handle)


def is_scratch(folder: Path) -> bool:
    """Return whether a folder is a scratch folder that a process of this user made on this machine."""
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
    shutil.rmtree(folder, ignore_errors=True)  # files that are left are swept later


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Remove files of these names, then the folder if it is empty. Of a symbolic link, only the link is removed."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def partial_path(path: Path) -> Path:
    """Return the path of a temporary file in the same folder, with the process id and host in its name."""
    return path.with_name(f".{path.name}.{os.getpid()}-{_host()}.partial")


def sweep_partials(folder: Path, name: str = "") -> None:
    """Remove partial files that killed processes of this user and host left in a folder.

    Args:
        name: Remove only partial files of this name; empty: of all names.
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
    """Return whether a process is running on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # a number from an untrusted file name
        return False
    except PermissionError:
        return True
    with contextlib.suppress(
        psutil.Error, OSError
    ):  # psutil raises where /proc is hidden, also for this process
        # a zombie keeps its pid until it is waited for
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return True


def _is_own_file(path: str | Path) -> bool:
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


@cache
def _host() -> str:
    """Return a short hash of the host and its process id namespace (container), in which process ids are unique."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{os.uname().nodename} {space}".encode()).hexdigest()[:8]


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot of the machine, a UUID; empty where the system has none, as on macOS."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _this_machine() -> dict[str, str]:
    """Return the identity of this boot: locks on a shared disk may be local, so other machines' folders are kept."""
    return {"host": os.uname().nodename, "boot": boot_id()}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, made if missing. The kernel releases the lock when the process ends, however it ends.

    Without a lock, as on some network file systems, the block runs at once: what two processes do must do no harm.
    """
    handle = None
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def check_own_folder(folder: Path) -> None:
    """Refuse a folder of files that count as this process's own, but that other users could change.

    Raises:
        PermissionError: It belongs to another user, or every user can write to it.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, "it belongs to another user, who could change the files in it"
        )
    if status.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "every user can write to it, and could change the files")
