"""The error for a path that is no run folder: the same one in all commands."""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from samebits.errors import CheckpointError

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
        raise CheckpointError(f"the path of the run folder {path.absolute()} is not UTF-8", fix="Rename it.")


def is_published(names: Collection[str]) -> bool:
    """Return whether a folder with these entries is a model that `samebits push` published.

    It has the settings and the result of a run, and is none: its weights have another name.
    """
    return not _PUBLISHED.difference(names) and "weights.safetensors" not in names


def no_run(path: Path) -> CheckpointError:
    """Make the error for a path that is no run folder, with runs inside it or nearby."""
    runs = runs_in(path) or runs_in(path.parent) or runs_in(Path("runs"))
    fix = f"Name a run folder: {', '.join(runs)}" if runs else "Name a run folder. To make one: samebits train digits"
    if not os.path.lexists(path):
        return CheckpointError(f"{path} does not exist", fix=fix)
    reason = "" if os.path.lexists(path / "config.yaml") else ": it has no config.yaml"
    return CheckpointError(f"{path} is not a run folder{reason}", fix=fix)


def runs_in(folder: Path) -> list[str]:
    """Return the newest run folders in a folder."""
    found = [path for path in folder.glob("*/config.yaml") if path.is_file() and not is_published(_names(path.parent))]
    found.sort(key=os.path.getmtime)
    return [str(file.parent) for file in found[-_SHOWN:]]


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []
