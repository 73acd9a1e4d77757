"""The image files below a class folder, by name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

# Of the system, not of the disk: they hold processes and devices, and do not end.
_NO_FILES = tuple(map(Path, ("/proc", "/sys", "/dev")))


def walk(root: Path, name: str) -> list[str]:
    """The images in a folder below the root and in folders further down, relative to the root; links are followed.

    Raises:
        DataError: A link leads to a folder that the root is in, or to the system's own.
    """
    found, seen = [], set()
    whole = Path(os.path.realpath(root))
    for folder, inner, files in os.walk(root / name, followlinks=True):
        facts = os.stat(folder)
        if (facts.st_dev, facts.st_ino) in seen:  # a link leads back to where we were
            inner.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        if os.path.islink(folder):
            _check_link(folder, whole)
        inner.sort()  # of several ways to a folder, always the same one is taken
        inside = Path(folder).relative_to(root).as_posix()
        found += [f"{inside}/{file}" for file in files if is_picture(file)]
    return found


def _check_link(link: str, root: Path) -> None:
    target = Path(os.path.realpath(link))
    if target in root.parents or any(target.is_relative_to(folder) for folder in _NO_FILES):
        raise DataError(f"the link {link} leads to {target}, which is no folder of images", fix="remove the link")


def is_picture(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def check_names(root: Path, names: Iterable[str]) -> None:
    """Refuse names that are not text: a run keeps them, and prints them."""
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise DataError(f"a name in {root} is not UTF-8: {shown}", fix="rename it") from None
