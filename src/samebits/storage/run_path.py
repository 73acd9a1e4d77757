"""The error for a path that is no run folder: the same one in all commands."""

from __future__ import annotations

import os
from pathlib import Path

from samebits.errors import CheckpointError

_SHOWN = 5  # runs, in an error


def check_run_path(path: Path) -> None:
    """Check that a path is a run folder, without reading it.

    Raises:
        CheckpointError: The path does not exist, or is no run folder.
    """
    if not os.path.lexists(path / "config.yaml"):
        raise no_run(path)


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
    found = sorted(filter(os.path.isfile, folder.glob("*/config.yaml")), key=os.path.getmtime)
    return [str(file.parent) for file in found[-_SHOWN:]]
