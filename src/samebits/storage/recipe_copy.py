"""The copy of a recipe file in a run folder, and the comparison of the file with it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.config.plain_file import parse_json, read_plain

if TYPE_CHECKING:
    from samebits.storage.run_folder import RunFolder

COPY, RECORD = "recipe.py", "recipe.json"


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
    from samebits.storage.run_folder import write_atomically  # late: it imports torch

    write_atomically(folder.path / COPY, content)
    folder.write_json(RECORD, {"file": recipe, "sha256": hashlib.sha256(content).hexdigest()})


def kept_sha256(folder: Path) -> str | None:
    """Return the SHA-256 of the recipe file at the start of the run; None if the run folder does not record it."""
    try:
        record = parse_json(read_plain(folder / RECORD))
    except (OSError, ValueError):
        return None
    sha256 = record.get("sha256") if isinstance(record, dict) else None
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
