"""Distinguish a run's own files from those that the user has put among them, which a run never removes or moves."""

import contextlib
import os
import re
from pathlib import Path

from samebits.config.plain_file import read_plain
from samebits.errors import CheckpointError
from samebits.scratch import remove_named
from samebits.storage.manifest import FILES, MAX_STATE_BYTES, STATE, parse_object

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
        return parse_object(path / STATE, read_plain(path / STATE, MAX_STATE_BYTES)).get("step") != step
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
