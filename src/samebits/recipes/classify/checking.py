"""Find unreadable images before training starts, for data.on_error=skip."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from samebits.cores import num_cores
from samebits.data.images import read_rgb
from samebits.errors import DataError
from samebits.recipes.classify.folders import Files, folder_of, kind_of
from samebits.recipes.classify.rows import ImageRows


def drop_unreadable(
    files: Files,
    base: Path,
    least: int = 1,
    images: Path | None = None,
    columns: tuple[str, str] | None = None,
) -> tuple[Files, dict[str, str]]:
    """Decode every image, and leave out those that cannot be decoded.

    Args:
        files: Files by class, relative to the base.
        base: A folder, or a CSV file in it.
        least: Readable images that each class needs, if it has that many files.
        images: Folder that the paths of a CSV file are relative to. None: its own folder.
        columns: Columns of image and class in rows. None: the usual ones.

    Returns:
        The readable files, and the problem of each unreadable one.

    Raises:
        DataError: A class has too few readable images, or no image is readable.
    """
    folder = folder_of(base, images)
    names = [file for found in files.values() for file in found]
    # Threads instead of processes, since decoding releases the GIL.
    with ThreadPoolExecutor(num_cores()) as pool:
        if kind_of(base) is None:
            found_faults = pool.map(_fault, [folder / name for name in names], chunksize=16)
        else:
            rows = ImageRows(base, columns)
            found_faults = map(partial(_fault_of_row, rows), names)
        faults = dict(zip(names, found_faults, strict=True))
    kept = {name: [file for file in found if faults[file] is None] for name, found in files.items()}
    for name, found in kept.items():
        if len(found) < min(least, len(files[name])):
            fault = next(file for file in files[name] if faults[file] is not None)
            many = "only one" if found else "no"
            raise DataError(
                f"{many} image of class {name} can be read",
                where=folder / fault,
                allowed=f"{least} or more" if least > 1 else None,
                cause=faults[fault],
                fix="Add readable images to the class, or move its folder elsewhere.",
            )
    if names and not any(kept.values()):
        raise DataError(
            f"no image of {base} can be read", cause=faults[names[0]], fix="Replace the images by readable ones."
        )
    return kept, {file: fault for file, fault in faults.items() if fault is not None}


def _fault(path: Path) -> str | None:
    try:
        read_rgb(path)
    except DataError as error:
        return error.what
    return None


def _fault_of_row(rows: ImageRows, name: str) -> str | None:
    try:
        rows.pixels(int(name))
    except DataError as error:
        return error.what
    return None
