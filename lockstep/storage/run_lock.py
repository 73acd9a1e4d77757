"""One process at a time has a run folder: by a lock on `run.lock`; where there are no locks, by a file `run.owner`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

from lockstep.errors import CheckpointError, cannot_write
from lockstep.scratch import is_running

LOCK = "run.lock"
# Only on file systems without locks.
OWNER = "run.owner"
# What a killed rank has started holds its folder until it has noticed; on a busy machine that takes a while.
_ORPHANS_END_S = 15.0
_IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_LONGEST = 4096


class RunLock:
    """The right to write to a run folder, from `take` until `release` or the process's end.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self.owner = folder / OWNER
        self._file: IO[str] | None = None
        self._has_owner_file = False

    def take(self) -> None:
        """Take the folder for this process.

        Raises:
            CheckpointError: Another process has it, or the lock file can't be written.
        """
        try:
            # Not through a symbolic link: the folder may be a stranger's, and the link lead to a file of the user.
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            file = os.fdopen(handle, "a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            self._lock(file)
            file.truncate(0)
            file.write(f"{_me()}\n")
            file.flush()
        except OSError as error:
            file.close()
            raise cannot_write(self.path, error) from None
        except BaseException:
            file.close()
            raise
        self._file = file

    def release(self) -> None:
        """Let others take the folder."""
        if self._file is not None:
            # The file stays: were it removed, one process could wait for the old file while another locks a new one.
            self._file.truncate(0)
            self._file.close()
            self._file = None
        if self._has_owner_file:
            self.owner.unlink(missing_ok=True)
            self._has_owner_file = False

    def _lock(self, file: IO[str]) -> None:
        end = time.monotonic() + _ORPHANS_END_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in _IN_USE:
                    self._take_owner_file()
                    return
            if _lives(_read(self.path)) or time.monotonic() > end:
                raise CheckpointError(
                    f"run folder {self.path.parent} is in use",
                    by=_read(self.path),
                    fix="wait for it, stop it, or give another --run-dir",
                )
            time.sleep(0.02)

    def _take_owner_file(self) -> None:
        """This file system has no locks: a file that only one process can make stands for one."""
        while True:
            try:
                handle = os.open(self.owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            except FileExistsError:
                owner = _read(self.owner)
                if owner and not _lives(owner):
                    self.owner.unlink(missing_ok=True)
                    continue
                raise CheckpointError(
                    f"run folder {self.owner.parent} is in use",
                    by=owner,
                    where="on a file system without locks, so it can't be seen from here whether that process lives",
                    fix=f"wait for it or stop it; if it has ended, remove {self.owner}",
                ) from None
            os.write(handle, f"{_me()}\n".encode())
            os.close(handle)
            self._has_owner_file = True
            return


def is_lock(path: Path) -> bool:
    """Whether a file is one that this module has written."""
    with contextlib.suppress(OSError):
        return not path.is_symlink() and path.is_file() and (path.stat().st_size == 0 or bool(_parsed(_read(path))))
    return False


def _me() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _parsed(owner: str) -> re.Match[str] | None:
    return re.fullmatch(r"process (\d+) on (.+)", owner)


def _lives(owner: str) -> bool:
    """Whether `process N on HOST` is there, as far as can be seen from here."""
    match = _parsed(owner)
    if match is None:
        return False  # it is just taking the folder, or leaving it
    return match[2] != os.uname().nodename or is_running(int(match[1]))
