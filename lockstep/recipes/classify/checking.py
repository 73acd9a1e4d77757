"""Finds the images that cannot be read, before training begins."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.cores import num_cores
from lockstep.data.images import read_rgb
from lockstep.errors import DataError
from lockstep.recipes.classify.listing import Files, folder_of


def drop_unreadable(
    files: Files, base: Path, least: int = 1, images: Path | None = None
) -> tuple[Files, dict[str, str]]:
    """Read every image whole, and leave out those that cannot be.

    Args:
        files: By class, relative to the base.
        base: A folder, or a CSV file in it.
        least: How many of each class have to be left, of those that have so many.
        images: What a CSV file's paths are relative to, if not its own folder.

    Returns:
        The files that can be read, and why each of the others cannot.

    Raises:
        DataError: Of a class too few are left, or nothing at all is.
    """
    folder = folder_of(base, images)
    names = [file for found in files.values() for file in found]
    # Decoding lets other threads run.
    with ThreadPoolExecutor(num_cores()) as pool:
        faults = dict(zip(names, pool.map(_fault, [folder / name for name in names], chunksize=16), strict=True))
    kept = {name: [file for file in found if faults[file] is None] for name, found in files.items()}
    for name, found in kept.items():
        if len(found) < min(least, len(files[name])):
            fault = next(file for file in files[name] if faults[file] is not None)
            many = "only one" if found else "no"
            raise DataError(
                f"{many} image of class {name} can be read",
                allowed=f"{least} or more" if least > 1 else None,
                first=faults[fault],
                where=folder / fault,
            )
    if names and not any(kept.values()):
        raise DataError(f"no image of {base} can be read", first=faults[names[0]])
    return kept, {file: fault for file, fault in faults.items() if fault is not None}


def _fault(path: Path) -> str | None:
    try:
        read_rgb(path)
    except DataError as error:
        return error.what
    return None


def skipped_row(skipped: Sequence[str]) -> str:
    """For the head of a run: what was left out; empty if nothing."""
    if not skipped:
        return ""
    shown = ", ".join(list(skipped)[:3]) + (" …" if len(skipped) > 3 else "")
    return f"{len(skipped):,} image{'s' if len(skipped) > 1 else ''} that cannot be read: {shown}"
