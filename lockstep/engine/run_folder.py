"""The folder that holds all of a run. Only rank 0 writes into it, but for each rank's log."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lockstep.cluster.rollcall import is_running
from lockstep.config.plain_file import parse_json, read_plain
from lockstep.errors import CheckpointError, cannot_make, cannot_write, cannot_write_result

# What a killed rank has started holds its folder until it has noticed; on a busy machine that takes a while.
_ORPHANS_END_S = 15.0


def new_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Make a folder that did not exist: runs/digits-0001, -0002 and so on.

    Raises:
        CheckpointError: It can't be made.
    """
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    while True:
        taken = [int(match[1]) for path in parent.glob(f"{name}-*") if (match := pattern.fullmatch(path.name))]
        path = parent / f"{name}-{max(taken, default=0) + 1:04}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # another command was quicker
        except OSError as error:
            raise cannot_make(path, error) from None
        return path


def drop_empty(path: Path) -> None:
    """Remove a new run folder of a run that never began: it would only be in the way."""
    if not (path / "config.yaml").exists():
        shutil.rmtree(path, ignore_errors=True)  # it is in the way, no more


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that there is either the old or the new one, whole, whenever the machine stops.

    Raises:
        CheckpointError: It can't be written: no space, no permission.
    """
    with written_whole(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place to write a file to, which then gets its name.

    Raises:
        CheckpointError: It can't be written: no space, no permission.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        # On a read-only disk, removing what is not there is an error too.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise cannot_write(path, error) from None


def sync_folder(path: Path) -> None:
    """Make renames in a folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take(lock: IO[str]) -> bool:
    """Lock a file; False where a process that lives has it."""
    end = time.monotonic() + _ORPHANS_END_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if _lives(_owner(lock)) or time.monotonic() > end:
                return False
        time.sleep(0.02)


def _owner(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read().strip()


def _lives(owner: str) -> bool:
    """Whether `process N on HOST` is there, as far as can be seen from here."""
    match = re.fullmatch(r"process (\d+) on (.+)", owner)
    if match is None:
        return False  # it is just taking the folder, or leaving it
    return match[2] != os.uname().nodename or is_running(int(match[1]))


class RunFolder:
    """A run's files.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def weights(self) -> Path:
        """The weights that eval, predict and export open."""
        return self.path / "weights.safetensors"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def pictures(self) -> Path:
        """Where pictures lie."""
        return self.path / "pictures"

    def open(self) -> None:
        """Make the folder and take it for this process, until `close` or the process's end.

        Raises:
            CheckpointError: It can't be made, or another process has it.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "run.lock").open("a+")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        if not _take(lock):
            owner = _owner(lock)
            lock.close()
            raise CheckpointError(
                f"run folder {self.path} is in use", by=owner, do="wait for it, stop it, or give another --run-dir"
            )
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            # The file stays: were it removed, one process could wait for the old file while another locks a new one.
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def _repair(self, name: str) -> str:
        if name == "result.json":
            return f"lockstep train --run-dir {self.path} --resume auto writes it again"
        return "put the file back as it was"

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        path = self.path / name
        try:
            content = parse_json(read_plain(path))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist", do="is it a run folder, and did its training end?"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{path} can't be read", reason=reason, do=self._repair(name)) from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no JSON object", do=self._repair(name))
        return content


def check_run_dir(path: Path) -> None:
    """See that a run's folder could be made and written to, before processes start; leaves nothing behind.

    Raises:
        CheckpointError: It could not.
    """
    try:
        _try_out(_nearest(path))
    except OSError as error:
        raise cannot_make(path, error) from None


def check_place(path: Path) -> None:
    """See that a file could be written, before the work whose result it is to hold; leaves nothing behind.

    Raises:
        CheckpointError: It could not.
    """
    try:
        above = _nearest(path.parent)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is no folder")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        _try_out(above)
    except OSError as error:
        raise cannot_write_result(path, error) from None


def _nearest(path: Path) -> Path:
    """What there is of a path: itself, or the first above it."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if _is_there(place))


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _try_out(folder: Path) -> None:
    # What may be written, to /proc for one, is not said by permissions.
    with tempfile.TemporaryDirectory(prefix=".lockstep-", dir=folder):
        pass
