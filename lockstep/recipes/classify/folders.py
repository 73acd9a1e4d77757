"""List the image files in a class folder and its subfolders, by their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

# Virtual file systems of the kernel, which have no images and may be endless.
_NO_FILES = tuple(map(Path, ("/proc", "/sys", "/dev")))


def walk(root: Path, name: str) -> list[str]:
    """List the images in a folder below the root, recursively. Links are followed.

    Returns:
        Paths relative to the root.

    Raises:
        DataError: A link points to a parent folder of the root, or to a folder of the system.
    """
    names, seen = [], set()
    whole = Path(os.path.realpath(root))
    for folder, inner, files in os.walk(root / name, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link back to a folder that was listed
            inner.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        if os.path.islink(folder):
            _check_link(folder, whole)
        inner.sort()  # if several paths lead to the same folder, the choice is reproducible
        inside = Path(folder).relative_to(root).as_posix()
        names += [f"{inside}/{file}" for file in files if is_image(file)]
    return names


def _check_link(link: str, root: Path) -> None:
    target = Path(os.path.realpath(link))
    if target in root.parents or any(target.is_relative_to(folder) for folder in _NO_FILES):
        raise DataError(f"the link {link} points to {target}, not to a folder of images", fix="Remove the link.")


def is_image(name: str) -> bool:
    """Return whether a file of this name counts as an image."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def check_names(root: Path, names: Iterable[str]) -> None:
    """Refuse file names that are not UTF-8, because a run stores and prints them.

    Raises:
        DataError: A name is not UTF-8.
    """
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise DataError(f"a name in {root} is not UTF-8: {shown}", fix="Rename it.") from None
