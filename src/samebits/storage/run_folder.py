"""The run folder, which holds all files of a run. Rank 0 writes all of them but the other ranks' logs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from samebits.errors import (
    CheckpointError,
    ConfigError,
    cannot_make,
    cannot_write,
    cannot_write_result,
)
from samebits.plain_file import MAX_MEMORY_BYTES, as_dict, json_text, parse_json, read_plain
from samebits.scratch import partial_path, remove_named, scratch_folder, sweep, sweep_partials
from samebits.storage.manifest import FILES, MAX_STATE_BYTES, STATE, parse_object
from samebits.storage.run_lock import LOCK, RunLock, is_lock

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
        taken = [
            int(match[1])
            for path in parent.glob(f"{name}-*")
            if (match := pattern.fullmatch(path.name))
        ]
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
    with atomic_file(path) as partial:
        # On disk before the rename: otherwise a power cut could leave an empty file under the final name.
        write_synced(partial, content)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
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
        #: The final weights, which eval, predict and export open.
        self.weights = path / "weights.safetensors"
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

    def check_there(self) -> None:
        """Check that the folder was not deleted or moved since `open`: the rest of a run would be half a folder.

        Raises:
            CheckpointError: It was.
        """
        if self._lock is not None and not self._lock.is_there:
            raise CheckpointError(
                f"run folder {self.path} was deleted or moved during the run",
                cause="another program or user has done so; the disk may have been unmounted",
                fix="Move it back and resume with --resume auto; if it is lost, start the run again.",
            )

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_atomically(self.path / name, json_text(content, indent=2) + b"\n")

    def read_json(self, name: str, max_memory_bytes: int = MAX_MEMORY_BYTES) -> dict[str, Any]:
        """Read a JSON file. Raises CheckpointError if it is missing or damaged."""
        path = self.path / name
        fix = "Restore the file."
        if name == "result.json":
            fix = f"Run samebits train --run-dir {self.path} --resume auto, which writes it again."
        try:
            content = parse_json(read_plain(path), max_memory_bytes)
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
        _try_out(nearest(path))
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
        found += [
            f"logs/{log.name}" for log in sorted((path / "logs").glob("*")) if not is_own_log(log)
        ]
        if found:
            raise CheckpointError(
                f"{path} is no run folder, and a run would overwrite {', '.join(found)} in it",
                fix=_ANOTHER,
            )
    try:
        check_entries(path)
    except OSError as error:
        raise cannot_make(path, error) from None


def holds_a_run(path: Path) -> CheckpointError:
    """Return the error for a new run in a folder that already holds one."""
    return CheckpointError(
        f"run folder {path} already holds a run",
        fix="Add --resume auto to continue it, or give another --run-dir.",
    )


def check_target(path: Path, is_own: Callable[[Path], bool] = lambda _: False) -> None:
    """Check that a result file can be written, before the work that produces it. Leaves nothing behind.

    An existing file may be replaced if it is the command's own.
    """
    try:
        above = nearest(path.parent)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is not a folder")
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        _try_out(above)
    except OSError as error:
        raise cannot_write_result(path, error) from None
    if os.path.lexists(path) and not is_own(path):
        raise CheckpointError(
            f"{path} already exists, and this command did not write it as it is",
            fix="Remove it, or give another path.",
        )


def nearest(path: Path) -> Path:
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


# The error for a path that is no run folder: the same one in all commands.


_PUBLISHED = frozenset({"config.json", "model.safetensors", "README.md"})
_SHOWN = 5  # runs, in an error


def check_run_path(path: Path) -> None:
    """Check that a path is a run folder, by the names of its files alone.

    Raises:
        CheckpointError: The path does not exist, is no run folder, or is not UTF-8.
    """
    if not os.path.lexists(path / "config.yaml"):
        raise no_run(path)
    check_utf8(path)


def check_utf8(path: Path) -> None:
    """Refuse a run folder whose path is not UTF-8: safetensors and TensorBoard, among others, cannot open its files."""
    if re.search(r"[\ud800-\udfff]", str(path.absolute())):
        raise CheckpointError(
            f"the path of the run folder {path.absolute()} is not UTF-8", fix="Rename it."
        )


def is_published(names: Collection[str]) -> bool:
    """Return whether a folder with these entries is a model that `samebits push` published.

    It has the settings and the result of a run, and is none: its weights have another name.
    """
    return not _PUBLISHED.difference(names) and "weights.safetensors" not in names


def no_run(path: Path) -> CheckpointError:
    """Make the error for a path that is no run folder, with runs inside it or nearby."""
    runs = runs_in(path) or runs_in(path.parent) or runs_in(Path("runs"))
    fix = (
        f"Name a run folder: {', '.join(runs)}"
        if runs
        else "Name a run folder. To make one: samebits train digits"
    )
    if not os.path.lexists(path):
        return CheckpointError(f"{path} does not exist", fix=fix)
    reason = "" if os.path.lexists(path / "config.yaml") else ": it has no config.yaml"
    return CheckpointError(f"{path} is not a run folder{reason}", fix=fix)


def runs_in(folder: Path) -> list[str]:
    """Return the newest run folders in a folder."""
    found = [
        path
        for path in folder.glob("*/config.yaml")
        if path.is_file() and not is_published(_names(path.parent))
    ]
    found.sort(key=os.path.getmtime)
    return [str(file.parent) for file in found[-_SHOWN:]]


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


# Refuse a folder of a run in which a write would leave the folder or block forever.
#
# A run folder may come from another user. In it, `logs` can be a link to a folder of this user, a log file a link to
# any file, and `metrics.part` a FIFO, on which a write waits for a reader.


FOLDERS = "checkpoints", "logs", "pictures", "tensorboard", "trackers"
_DO = "Give another --run-dir, or replace it with a regular file or folder."


def check_entries(run: Path) -> None:
    """Check that the folders of a run are folders and its files are files, none of them a symbolic link.

    Links to folders under names that no run writes to are allowed, and so are checkpoints that are links: a run only
    reads those, or removes the link.

    Raises:
        CheckpointError: An entry is a link, a FIFO or a device, or a file has the name of a folder.
        OSError: A folder cannot be read.
    """
    folders = [run]
    for folder in (run / name for name in FOLDERS):
        try:
            mode = folder.lstat().st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            raise _through_link(folder)
        if not stat.S_ISDIR(mode):
            raise CheckpointError(
                f"{folder} is not a folder, and a run would write files into it", fix=_DO
            )
        folders.append(folder)
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in entries:
                if os.path.isdir(
                    entry.path
                ):  # follows links; unlike entry.is_dir, no error for a link to itself
                    continue
                if entry.is_symlink():
                    raise _through_link(Path(entry.path))
                if not entry.is_file() and os.path.lexists(
                    entry.path
                ):  # a running process may have removed it
                    raise CheckpointError(
                        f"{entry.path} is neither a file nor a folder, and a run might write to it",
                        fix=_DO,
                    )


def _through_link(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is a symbolic link, and a run would write through it", fix=_DO)


# Distinguish a run's own files from those that the user has put among them, which a run never removes or moves.


_TIME = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
# Names of the logs of a launcher and of a rank, and how each begins.
_LOGS = (
    (re.compile(r"launcher\.log"), rb"(?:%s \S|\Z)" % _TIME),
    (re.compile(r"stacks-rank-\d+\.txt"), rb"rank \d+ \(host |\Z"),
    (re.compile(r"rank-\d+\.log"), rb"(?:%s,\d{3} [A-Z]+ +(?:samebits|py\.warnings)|\Z)" % _TIME),
)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, damaged or not: by its name, and as it has a checkpoint's files."""
    is_named = path.name.startswith("step-") and path.name.removeprefix("step-").isdecimal()
    return is_named and path.is_dir() and any(os.path.lexists(path / name) for name in FILES)


def is_foreign(path: Path, step: int) -> bool:
    """Return whether the user has put a file into a step's checkpoint, or has copied it from another step's name."""
    try:
        if any(name not in FILES for name in os.listdir(path)):
            return True
        return (
            parse_object(path / STATE, read_plain(path / STATE, MAX_STATE_BYTES)).get("step")
            != step
        )
    except (OSError, CheckpointError):
        return False  # damaged


def is_own_log(path: Path) -> bool:
    """Return whether a file in `logs/` is a run's: it has no name of one, is empty, or begins as one does.

    Other processes and machines may have begun the same run, so that a log is there before the run's lock.
    """
    kind = next((pattern for name, pattern in _LOGS if name.fullmatch(path.name)), None)
    if kind is None:
        return True
    try:
        with path.open("rb") as file:
            return re.match(kind, file.read(200) if path.is_file() else b"?") is not None
    except OSError:
        return True  # `check_entries` names what cannot be read or is no file


def take_name(target: Path) -> Path:
    """Rename a checkpoint to a name that no reader looks for; return that name, also if there is no checkpoint."""
    nameless = target.with_name(f".{target.name}.{os.getpid()}.partial-old")
    if target.exists():
        target.rename(nameless)
    return nameless


def give_back(old: Path, target: Path) -> None:
    """Remove a checkpoint that lost its name, and move the user's files in it into `target`, as far as they can be."""
    with contextlib.suppress(OSError):
        for name in os.listdir(old) if not old.is_symlink() else ():
            if name not in FILES and target.is_dir() and not os.path.lexists(target / name):
                (old / name).rename(target / name)
    remove_named(old, FILES)


# Recognize files that `samebits export` has written, the only existing files that it may overwrite.


_MOST_BYTES = 1 << 20
FIELD = "samebits"
# The start of an ONNX file in protobuf: field 1 as a number. The metadata key: field 1 as a string of 8 bytes.
_ONNX_HEAD = b"\x08"
_ONNX_KEY = b"\x0a\x08" + FIELD.encode()


def is_export(path: Path) -> bool:
    """Return whether `samebits export` wrote a file, according to the file's metadata."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            size = path.stat().st_size
            if zipfile.is_zipfile(file):  # torch-export
                return any(
                    name.endswith(f"/{FIELD}.json") for name in zipfile.ZipFile(file).namelist()
                )
            # `is_zipfile` has moved the position to the end.
            file.seek(0)
            head = file.read(8)
            length = int.from_bytes(head, "little")
            # Read as the length of a safetensors header, the first bytes of an ONNX file exceed the file's size by far.
            if head[:1] == _ONNX_HEAD and length > size:
                file.seek(max(0, size - _MOST_BYTES))  # ONNX stores the metadata behind the graph
                return _ONNX_KEY in file.read()
            header = json.loads(file.read(min(length, _MOST_BYTES)))  # safetensors
            return FIELD in header.get("__metadata__", {})
    # RecursionError: Python's JSON parser raises it for deep nesting. Any such file is another program's.
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, zipfile.BadZipFile):
        return False


# The copy of a recipe file in a run folder, and the comparison of the file with it.


COPY = "recipe.py"
RECORD = "recipe.json"


def keep_recipe(folder: RunFolder, recipe: str) -> None:
    """Copy a recipe file, unless it is built in, as `recipe.py`, with its path and SHA-256 in `recipe.json`.

    Samebits never runs the copy. It only documents what the run was trained with.

    Raises:
        CheckpointError: The copy cannot be written.
    """
    if not recipe.endswith(".py"):
        return
    try:
        content = read_plain(Path(recipe))
    except OSError:
        return  # the file was removed after its import
    write_atomically(folder.path / COPY, content)
    folder.write_json(RECORD, {"file": recipe, "sha256": hashlib.sha256(content).hexdigest()})


def kept_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of the recipe file at the start of the run; None if the run folder does not record it."""
    try:
        record = parse_json(read_plain(folder / RECORD))
    except (OSError, ValueError):
        return None
    sha256 = as_dict(record).get("sha256")
    return sha256 if isinstance(sha256, str) else None


def recipe_change(folder: Path, recipe: str) -> str | None:
    """Return a warning if a run's recipe file differs from the one that the run was trained with."""
    before = kept_sha256(folder) if recipe.endswith(".py") else None
    if before is None:
        return None
    try:
        now = hashlib.sha256(read_plain(Path(recipe))).hexdigest()
    except OSError:
        return None  # opening the recipe reports the error
    if before == now:
        return None
    return (
        f"warning: recipe file {recipe} has changed since the run in {folder} started, so results may differ\n"
        f"  then     sha256 {before}, copied to {folder / COPY}\n  now      sha256 {now}"
    )


def describe_copy(folder: Path) -> str | None:
    """Describe the recipe file that a run was trained with, for an error; None if there is no record."""
    sha256 = kept_sha256(folder)
    return None if sha256 is None else f"trained with sha256 {sha256}, copied to {folder / COPY}"
