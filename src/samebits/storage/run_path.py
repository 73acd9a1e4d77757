"""The error for a path that is no run folder: the same one in all commands."""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from samebits.config.plain_file import parse_json, read_plain
from samebits.errors import CheckpointError

_MAX_BYTES = 1024 * 1024
_PUBLISHED = frozenset({"config.json", "model.safetensors", "README.md"})
_SHOWN = 5  # runs, in an error


def check_run_path(path: Path) -> None:
    """Check that a path is a run folder of this version, by its small files alone.

    Raises:
        CheckpointError: The path does not exist, is no run folder, or is one of before the project had its name.
    """
    if not os.path.lexists(path / "config.yaml"):
        raise no_run(path)
    check_version(path)


def check_version(path: Path) -> None:
    """Refuse a run folder that was written before the project had its present name.

    Its settings, records and checkpoints have other names: read in part, they would give a wrong result.
    """
    check_utf8(path)
    if not has_present_version(path):
        raise CheckpointError(
            f"{path} was written by a version from before the package was called samebits",
            where=path / "environment.json",
            fix="Use the version that wrote it, or train again in another run folder.",
        )


def check_utf8(path: Path) -> None:
    """Refuse a run folder whose path is not UTF-8: safetensors and TensorBoard, among others, cannot open its files."""
    if re.search(r"[\ud800-\udfff]", str(path.absolute())):
        raise CheckpointError(f"the path of the run folder {path.absolute()} is not UTF-8", fix="Rename it.")


def has_present_version(path: Path) -> bool:
    """Return whether a run folder names this package in `environment.json`, or has no such file yet."""
    try:
        packages = parse_json(read_plain(path / "environment.json", _MAX_BYTES), _MAX_BYTES)["packages"]
    except (OSError, ValueError, KeyError, TypeError):
        return True  # not there, or damaged: its readers report that
    return not isinstance(packages, dict) or not packages or "samebits" in packages


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
