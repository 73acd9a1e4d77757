"""The folder that holds all of a run. Only rank 0 writes into it, but for each rank's log."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain
from lockstep.errors import CheckpointError, cannot_make, cannot_write, cannot_write_result
from lockstep.scratch import partial_path, remove_named, sweep_partials
from lockstep.storage.run_entries import check_entries
from lockstep.storage.run_lock import LOCK, RunLock, is_lock

# What a run writes and would replace; beside its lock, which every run folder has.
_WRITTEN = (
    "config.yaml", "config.diff.yaml", "environment.json", "dataset_info.json", "facts.json", "metrics.jsonl",
    "result.json", "weights.safetensors", "checkpoints", "pictures", "tensorboard",
)  # fmt: skip
_ANOTHER = "give another --run-dir"
_LOG = re.compile(r"(launcher|rank-\d+)\.log|stacks-rank-\d+\.txt")


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
    """Remove a run folder that this command has made, if its run never began: it would only be in the way.

    Only what such a run writes is removed; a folder with anything else in it stays.
    """
    if (path / "config.yaml").exists():
        return
    with contextlib.suppress(OSError):
        (path / "checkpoints").rmdir()
    with contextlib.suppress(OSError):
        logs = [name for name in os.listdir(path / "logs") if _LOG.fullmatch(name)]
        remove_named(path / "logs", logs)
    remove_named(path, ["run.lock", "config.diff.yaml"])


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that there is either the old or the new one, whole, whenever the machine stops.

    Raises:
        CheckpointError: It can't be written: no space, no permission.
    """
    with atomic_file(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A place to write a file to, which then gets its name.

    Raises:
        CheckpointError: It can't be written: no space, no permission.
    """
    partial = partial_path(path)
    try:
        partial.unlink(missing_ok=True)  # a link in a stranger's folder would be written through
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


class RunFolder:
    """A run's files.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: RunLock | None = None

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint to resume from, damaged or not."""
        return any(
            path.is_dir() and path.name.removeprefix("step-").isdecimal() for path in self.checkpoints.glob("step-*")
        )

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
        lock = RunLock(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.take()  # before anything else is there: the lock tells that this is a run folder
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            lock.release()
            raise cannot_write(self.path, error) from None
        self._lock = lock
        sweep_partials(self.path)

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, whole or not at all."""
        write_atomically(self.path / name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

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
            content = parse_json(read_plain(path), MAX_MEMORY_BYTES)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist", fix="is it a run folder, and did its training end?"
            ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{path} can't be read", reason=reason, fix=self._repair(name)) from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no JSON object", fix=self._repair(name))
        return content


def check_run_dir(path: Path, resume: str = "never", *, is_first: bool = False) -> None:
    """See that a run's folder could be made and written to, before processes start; leaves nothing behind.

    Args:
        path: The folder.
        resume: As given.
        is_first: No other process can have begun this run in the meantime.

    Raises:
        CheckpointError: It could not, or something in it that no run has written would be lost.
    """
    try:
        _try_out(_nearest(path))
    except OSError as error:
        raise cannot_make(path, error) from None
    if path.is_dir():
        _check_contents(path, resume, is_first)


def _check_contents(path: Path, resume: str, is_first: bool) -> None:
    lock = path / LOCK
    is_run = is_lock(lock)
    if os.path.lexists(lock) and not is_run:
        raise CheckpointError(f"{lock} was not written by a run", fix=_ANOTHER)
    has_checkpoints = any((path / "checkpoints").glob("step-*/manifest.json"))
    if is_first and is_run and has_checkpoints and resume == "never":
        raise holds_a_run(path)
    goes_on = resume == "auto" and has_checkpoints and (path / "config.yaml").is_file()
    if not is_run and not goes_on:
        found = [name for name in _WRITTEN if os.path.lexists(path / name) and not _is_empty_folder(path / name)]
        if found:
            raise CheckpointError(
                f"{path} is no run folder, and a run would write over {', '.join(found)} in it", fix=_ANOTHER
            )
    try:
        check_entries(path)
    except OSError as error:
        raise cannot_make(path, error) from None


def holds_a_run(path: Path) -> CheckpointError:
    """The text for a run folder in which a new run was to begin."""
    return CheckpointError(
        f"run folder {path} holds a run already",
        fix="add --resume auto to go on with it, or give another --run-dir",
    )


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def check_place(path: Path, is_own: Callable[[Path], bool] = lambda _: False) -> None:
    """See that a file could be written, before the work whose result it is to hold; leaves nothing behind.

    Args:
        path: The file.
        is_own: Whether a file that is there is one that may be replaced, as the same command has written it.

    Raises:
        CheckpointError: It could not, or there is another file.
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
    if os.path.lexists(path) and not is_own(path):
        raise CheckpointError(
            f"{path} is there already, and was not written by this command", fix="remove it, or give another place"
        )


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
    # What may be written, to /proc for one, is not said by permissions. The file has no name, where there are such.
    with tempfile.TemporaryFile(dir=folder):
        pass
