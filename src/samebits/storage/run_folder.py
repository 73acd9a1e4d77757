"""The run folder, which holds all files of a run. Rank 0 writes all of them but the other ranks' logs."""

import contextlib
import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samebits.config.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.errors import CheckpointError, ConfigError, cannot_make, cannot_write, cannot_write_result
from samebits.scratch import partial_path, remove_named, scratch_folder, sweep, sweep_partials
from samebits.storage.foreign_files import is_checkpoint, is_own_log
from samebits.storage.run_entries import check_entries
from samebits.storage.run_lock import LOCK, RunLock, is_lock
from samebits.storage.run_path import check_utf8

# Files and folders that a run writes and would replace, in addition to its lock.
_WRITTEN = (
    "config.yaml", "config.diff.yaml", "environment.json", "dataset_info.json", "metrics.jsonl",
    "provenance.json", "result.json", "steps.bin", "weights.safetensors", "checkpoints", "pictures", "tensorboard",
    "trackers",
)  # fmt: skip
_ANOTHER = "Give another --run-dir."
_LOG = re.compile(r"(launcher|rank-\d+)\.log|stacks-rank-\d+\.txt")


def new_folder(name: str, parent: Path = Path("runs")) -> Path:
    """Create the next free folder: runs/digits-0001, -0002 and so on.

    Raises:
        CheckpointError: It cannot be created.
    """
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    while True:
        taken = [int(match[1]) for path in parent.glob(f"{name}-*") if (match := pattern.fullmatch(path.name))]
        path = parent / f"{name}-{max(taken, default=0) + 1:04}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # another command created it in the meantime
        except OSError as error:
            raise cannot_make(path, error) from None
        return path


def drop_empty(path: Path) -> None:
    """Remove a run folder that this command created, if its run never started.

    Only files that such a run writes are removed. A folder with any other file stays.
    """
    if (path / "config.yaml").exists():
        return
    # A folder with other files stays, since rmdir fails for it.
    with contextlib.suppress(OSError):
        (path / "checkpoints").rmdir()
    with contextlib.suppress(OSError):
        logs = [name for name in os.listdir(path / "logs") if _LOG.fullmatch(name)]
        remove_named(path / "logs", logs)
    remove_named(path, ["run.lock", "config.diff.yaml"])


@contextmanager
def folder_to_fill(out: Path) -> Iterator[Path]:
    """Yield a temporary folder whose content becomes that of `out`, which is new or empty.

    The content is moved when it is complete. After an error, `out` is as it was.

    Raises:
        ConfigError: `out` is a file, or a folder that is not empty.
        CheckpointError: It cannot be written.
    """
    try:
        if out.is_dir():
            sweep(out)  # what a killed command has left
        if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
            what = "not an empty folder" if out.is_dir() else "a file"
            raise ConfigError(f"{out} is {what}", fix="Name a new folder.")
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        try:
            out.mkdir(parents=True, exist_ok=True)
            with scratch_folder(out) as scratch:
                folder = scratch / "content"
                folder.mkdir()
                yield folder
                for path in folder.iterdir():
                    path.rename(out / path.name)
        # BaseException: Ctrl-C too must not leave the folders that were made here.
        except BaseException:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
    except OSError as error:
        raise cannot_write_result(out, error) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a crash at any time leaves either the old or the new content, whole.

    Raises:
        CheckpointError: It cannot be written, for example because the disk is full.
    """
    with atomic_file(path) as partial, partial.open("wb") as file:
        file.write(content)
        file.flush()
        # On disk before the rename: otherwise a power cut could leave an empty file under the final name.
        os.fsync(file.fileno())


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to the final path at the end.

    Raises:
        CheckpointError: It cannot be written, for example because the disk is full.
    """
    partial = partial_path(path)
    try:
        partial.unlink(missing_ok=True)  # a link in another user's folder would be written through
        yield partial
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        # On a read-only file system, removing a file that does not exist is an error too.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise cannot_write(path, error) from None


def sync_folder(path: Path) -> None:
    """Flush a folder, so that renames in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path  #: The folder.
        self.checkpoints = path / "checkpoints"  #: The folder of checkpoints.
        self.weights = path / "weights.safetensors"  #: The final weights, which eval, predict and export open.
        self.config = path / "config.yaml"  #: The resolved settings.
        self.pictures = path / "pictures"  #: The folder of charts and image sheets.
        self._lock: RunLock | None = None

    @property
    def has_checkpoints(self) -> bool:
        """Whether there is a checkpoint to resume from, damaged or not."""
        return any(map(is_checkpoint, self.checkpoints.glob("step-*")))

    def open(self, wait_s: float = 0.0) -> None:
        """Create the folder and lock it for this process, until `close` or the end of the process.

        Another process may hold the lock for `wait_s` seconds.

        Raises:
            CheckpointError: It cannot be created, or another process holds the lock.
        """
        lock = RunLock(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.take(wait_s)  # before any other file: the lock marks the folder as a run folder
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            lock.release()
            raise cannot_write(self.path, error) from None
        self._lock = lock
        # With the lock: a partial file may otherwise be that of a running process.
        sweep_partials(self.path)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(self.path / name, json_text(content, indent=2) + b"\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file. Raises CheckpointError if it is missing or damaged."""
        path, fix = self.path / name, "Restore the file."
        if name == "result.json":
            fix = f"Run samebits train --run-dir {self.path} --resume auto, which writes it again."
        try:
            content = parse_json(read_plain(path), MAX_MEMORY_BYTES)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist", fix="Give a run folder whose training has finished."
            ) from None
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{path} can't be read", cause=cause, fix=fix) from None
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no JSON object", fix=fix)
        return content


def check_run_dir(path: Path, resume: str = "never", *, is_first: bool = False) -> None:
    """Check that a run folder can be created and written, before processes start. Leaves nothing behind."""
    check_utf8(path)
    try:
        _try_out(_nearest(path))
    except OSError as error:
        raise cannot_make(path, error) from None
    if not path.is_dir():
        return
    lock = path / LOCK
    is_run = is_lock(lock)
    if os.path.lexists(lock) and not is_run:
        raise CheckpointError(f"{lock} was not written by a run", fix=_ANOTHER)
    has_checkpoints = any((path / "checkpoints").glob("step-*/manifest.json"))
    if is_first and is_run and has_checkpoints and resume == "never":
        raise holds_a_run(path)
    is_resumed = resume == "auto" and has_checkpoints and (path / "config.yaml").is_file()
    if not is_run and not is_resumed:
        entries = [path / name for name in _WRITTEN if os.path.lexists(path / name)]
        found = [entry.name for entry in entries if not entry.is_dir() or any(entry.iterdir())]
        found += [f"logs/{log.name}" for log in sorted((path / "logs").glob("*")) if not is_own_log(log)]
        if found:
            raise CheckpointError(
                f"{path} is no run folder, and a run would overwrite {', '.join(found)} in it", fix=_ANOTHER
            )
    try:
        check_entries(path)
    except OSError as error:
        raise cannot_make(path, error) from None


def holds_a_run(path: Path) -> CheckpointError:
    """Return the error for a new run in a folder that already holds one."""
    return CheckpointError(
        f"run folder {path} already holds a run", fix="Add --resume auto to continue it, or give another --run-dir."
    )


def check_target(path: Path, is_own: Callable[[Path], bool] = lambda _: False) -> None:
    """Check that a result file can be written, before the work that produces it. Leaves nothing behind.

    An existing file may be replaced if it is the command's own.
    """
    try:
        above = _nearest(path.parent)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        _try_out(above)
    except OSError as error:
        raise cannot_write_result(path, error) from None
    if os.path.lexists(path) and not is_own(path):
        raise CheckpointError(
            f"{path} already exists, and this command did not write it as it is", fix="Remove it, or give another path."
        )


def _nearest(path: Path) -> Path:
    """Return the path itself or its closest parent that exists."""
    for each in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            each.stat()
            return each
    return Path("/")


def _try_out(folder: Path) -> None:
    # Permissions do not predict whether a write succeeds (in /proc, for example). Where the OS allows, the file has no
    # name.
    with tempfile.TemporaryFile(dir=folder):
        pass
