"""List the image files in a class folder and its subfolders, by their names."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from lockstep.errors import DataError

ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")

# Common names of the folders of a training and a validation split. The first that exists is used.
_HALVES = (("train", "training"), ("val", "valid", "validation", "eval", "test"))

# More classes than any dataset has (ImageNet-21k: 21,841), fewer than a column of unique names.
MAX_CLASSES = 50_000

# Virtual file systems of the kernel, which have no images and may not end.
_NO_FILES = tuple(map(Path, ("/proc", "/sys", "/dev")))

# Class -> files, relative to the folder in which they were listed.
Files = dict[str, list[str]]


def list_folder(folder: Path, setting: str) -> Files:
    """List the images in class folders and their subfolders, sorted by name.

    Args:
        folder: The folder that contains the class folders.
        setting: The setting that names it, for errors.

    Raises:
        DataError: There are no class folders, or one is empty.
    """
    root = folder.expanduser()
    if root.is_file():
        raise DataError(
            f"{root} is a file, not a folder of class folders",
            given=f"{setting}={folder}",
            fix="Unpack it, if it is an archive. For CSV files, set data.train=train.csv data.eval=eval.csv.",
        )
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"the folder {root} can't be read: {error.strerror or error}",
            given=f"{setting}={folder}",
            fix=f"Set {setting} to a readable folder.",
        ) from error
    if not names:
        num_images = sum(is_image(name) for name in os.listdir(root))
        raise DataError(
            f"{root} contains no class folders",
            given=f"{num_images:,} images outside of class folders" if num_images else "no folders",
            allowed=f"{root}/daisy/a.jpg, {root}/tulips/b.jpg and so on: a folder for each class",
            fix="Move the images of each class into a folder named after the class.",
        )
    if {name.lower() for name in names} <= {half for halves in _HALVES for half in halves}:
        raise DataError(
            f"the folders in {root} look like a split, not like classes: {', '.join(names)}",
            fix=_split_settings(root, names),
        )
    check_names(root, names)
    check_classes(root, names)
    files: Files = {}
    for name in names:
        files[name] = sorted(walk(root, name))
        check_names(root, files[name])
        if not files[name]:
            raise DataError(
                f"the class folder {root / name} contains no images",
                allowed=f"files that end in {', '.join(ENDINGS)}",
                fix=f"Add images to it, move it out of {root}, or use another dataset folder.",
            )
    return files


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


def check_classes(path: Path, names: Collection[str]) -> None:
    """Refuse too many classes, and names of several lines, which would break tables and pictures.

    Args:
        path: The folder or CSV file that has them, for errors.
        names: Names of the classes.

    Raises:
        DataError: There are too many, or one has a line break.
    """
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{path} has {len(names):,} classes",
            allowed=f"at most {MAX_CLASSES:,}",
            fix="Check that labels are classes, not unique names.",
        )
    for name in names:
        if name.splitlines() != [name]:
            raise DataError(f"a class name in {path} has a line break: {name!r}", fix="Rename it.")


def _split_settings(root: Path, names: Sequence[str]) -> str:
    """Return a fix with the settings that name the folders of a split."""
    known = {name.lower(): name for name in names}
    train, validation = (next((known[half] for half in halves if half in known), None) for halves in _HALVES)
    if train is None or validation is None:
        return f"Set data.root to one of these folders, such as {root / names[0]}."
    return f"Set data.train={root / train} data.eval={root / validation}"
