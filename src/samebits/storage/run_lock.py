"""The lock of a run folder: flock on `run.lock`, or a file `run.owner` on file systems without locks."""

import contextlib
import errno
import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO

from samebits.errors import CheckpointError, cannot_write
from samebits.plain_file import read_part
from samebits.scratch import is_running

LOCK = "run.lock"
# Only on file systems without flock.
OWNER = "run.owner"
# Children of a killed rank inherit its lock and exit once they notice; on a busy machine that takes seconds.
_ORPHANS_END_S = 15.0
_IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_LONGEST = 4096


class RunLock:
    """The exclusive right to write to a run folder, from `take` until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self.owner = folder / OWNER
        self._file: IO[str] | None = None
        self._has_owner_file = False

    def take(self, wait_s: float = 0.0) -> None:
        """Lock the folder for this process; wait `wait_s` seconds for one that holds the lock and has not ended.

        Raises:
            CheckpointError: Another process holds the lock, or the lock file cannot be written.
        """
        try:
            # O_NOFOLLOW: in another user's folder, the lock could be a link to a file of this user.
            # O_APPEND: after `truncate`, a write at an old position would leave a hole of zeros before the text.
            handle = os.open(
                self.path,
                os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o644,
            )
            file = os.fdopen(handle, "a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            self._lock(file, wait_s)
            file.truncate(0)
            file.write(f"{_me()}\n")
            file.flush()
        except OSError as error:
            file.close()
            raise cannot_write(self.path, error) from None
        # Such as KeyboardInterrupt while it waits: an open file would keep the lock if it came just then.
        except BaseException:
            file.close()
            raise
        self._file = file

    @property
    def is_there(self) -> bool:
        """Whether the file that this process has locked is still the one at its path."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return self._file is None or os.path.samestat(
                os.fstat(self._file.fileno()), self.path.stat()
            )
        return False

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            # The file stays: if it were removed, one process could wait for the old file while another locks a new one.
            self._file.truncate(0)
            self._file.close()
            self._file = None
        if self._has_owner_file:
            self.owner.unlink(missing_ok=True)
            self._has_owner_file = False

    def _lock(self, file: IO[str], wait_s: float) -> None:
        start = time.monotonic()
        while True:
            try:
                # Without blocking: flock has no timeout, and the error has to name the owner.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                # Any other error, such as ENOLCK or EOPNOTSUPP of a network file system, shows that it has no locks.
                if error.errno not in _IN_USE:
                    self._take_owner_file(start + wait_s)
                    return
            owner = _read(self.path)
            limit_s = wait_s if _lives(owner) else max(wait_s, _ORPHANS_END_S)
            if time.monotonic() - start >= limit_s:
                raise CheckpointError(
                    f"run folder {self.path.parent} is in use",
                    given=owner,
                    fix="Wait for that process, stop it, or give another --run-dir.",
                )
            time.sleep(0.02)

    def _take_owner_file(self, end: float) -> None:
        """Create the owner file with O_EXCL, in place of a lock; wait for it until `end`, by the monotonic clock."""
        while True:
            try:
                handle = os.open(
                    self.owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644
                )
            except FileExistsError:
                owner = _read(self.owner)
                # An empty file: its owner has created it and not yet written its name.
                if owner and not _lives(owner):
                    self.owner.unlink(missing_ok=True)
                    continue
                if time.monotonic() < end:
                    time.sleep(0.02)
                    continue
                raise CheckpointError(
                    f"run folder {self.owner.parent} is in use",
                    given=owner,
                    cause="The file system has no locks, so this host can't find out whether that process is running.",
                    fix=f"Wait for it or stop it. If it has ended, remove {self.owner}.",
                ) from None
            os.write(handle, f"{_me()}\n".encode())
            os.close(handle)
            self._has_owner_file = True
            return


def holder_of(path: Path) -> tuple[int, str] | None:
    """Return process id and host in a lock file: of the process that holds the lock, or was killed with it."""
    match = _parsed(_read(path))
    return None if match is None else (int(match[1]), match[2])


def is_lock(path: Path) -> bool:
    """Return whether this module wrote a file."""
    with contextlib.suppress(OSError):
        return (
            not path.is_symlink()
            and path.is_file()
            and (path.stat().st_size == 0 or holder_of(path) is not None)
        )
    return False


def _me() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


def _read(path: Path) -> str:
    return read_part(path, _LONGEST, is_end=False).decode("utf-8", "replace").strip()


def _parsed(owner: str) -> re.Match[str] | None:
    return re.fullmatch(r"process (\d{1,10}) on (.{1,255})", owner)


def _lives(owner: str) -> bool:
    """Return whether `process N on HOST` is running, as far as this host can see."""
    match = _parsed(owner)
    if match is None:
        return False  # the process is just taking or releasing the lock
    return match[2] != os.uname().nodename or is_running(int(match[1]))
