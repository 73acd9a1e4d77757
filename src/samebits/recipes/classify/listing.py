"""List the images of a dataset, their classes and the validation split; and open them.

A listing is plain JSON and is stored in the run folder. It does not depend on the order of names in the file system.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.data.names import choose_validation, overlap_rows
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig, no_dataset
from samebits.recipes.classify.folders import NO_CLASS, Files
from samebits.recipes.classify.image_sets import ImageSet, open_set
from samebits.recipes.listing import find_faults, nearest_fix, some, whole_path


def list_images(config: DataConfig, seed: int) -> dict[str, Any]:
    """List the images of the settings and split them by the seed, if the settings do not name validation images.

    Raises:
        DataError: There are no images, or the splits do not match. The error names the path and the line of a CSV file.
    """
    path = config.root or config.train
    if path is None:
        raise no_dataset()
    left_out: Counter[str] = Counter()
    images = open_set(path, config)
    setting = "data.root" if config.train is None else "data.train"
    listed = images.list_by_class(setting, left_out, mixed=config.classes is not None)
    files = _select(listed, config.classes, path)
    usable, skipped = _usable(images, files, config, path, 2 if config.eval is None else 1)
    others = images
    if config.eval is None:
        train, validation = split(usable, config.val_fraction, seed)
    else:
        train, others = usable, open_set(config.eval, config)
        validation, more = list_validation(config.eval, config, list(files), left_out, others)
        skipped |= more
    return {
        "classes": list(files),
        "held_out_from": None if config.eval is None else whole_path(config.eval),
        "skipped": skipped,
        "left_out": left_out,
        "warnings": overlap_rows(_paths(images, train), _paths(others, validation)),
        "train": train,
        "held_out": validation,
    }


def list_validation(
    path: Path,
    config: DataConfig,
    classes: Sequence[str],
    left_out: Counter[str] | None = None,
    images: ImageSet | None = None,
) -> tuple[Files, dict[str, str]]:
    """List validation images, and find the unreadable ones if data.on_error=skip.

    Args:
        path: Class folders, a CSV file, or files with rows.
        classes: Classes of the training images. If data.classes selects them, others are left out.
        left_out: Counts the files that are not used; see `walk`.

    Returns:
        The images, and the problem of each that is left out.

    Raises:
        DataError: A class is not among the training images.
    """
    images = images or open_set(path, config)
    validation = images.list_by_class("data.eval", Counter() if left_out is None else left_out, mixed=True)
    unknown = [name for name in validation if name not in classes]
    if unknown and config.classes is None:
        raise DataError(
            f"class {unknown[0]} is in {path}, but not among the training images",
            given=f"classes without training images: {', '.join(unknown[:6])}" if len(unknown) > 1 else None,
            allowed=some(classes, 12),
            fix=nearest_fix(
                unknown[0],
                classes,
                "Add training images of this class, or set data.classes.",
                "Rename the class to {}.",
            ),
        )
    files = {name: validation[name] for name in classes if name in validation}
    return _usable(images, files, config, path, 0)


def _usable(images: ImageSet, files: Files, config: DataConfig, path: Path, least: int) -> tuple[Files, dict[str, str]]:
    """Return all files; with data.on_error=skip only readable ones, and the problem of each of the others.

    Args:
        least: Readable images that each class needs, if it has that many files.
    """
    if config.on_error == "stop":
        return files, {}
    names = [file for found in files.values() for file in found]
    faults = find_faults(names, lambda name: images.encoded(name).pixels())
    kept = {name: [file for file in found if file not in faults] for name, found in files.items()}
    for name, found in kept.items():
        if len(found) < min(least, len(files[name])):
            fault = next(file for file in files[name] if file in faults)
            raise DataError(
                f"{'only one' if found else 'no'} image of class {name} can be read",
                where=images.folder / fault,
                allowed=f"{least} or more" if least > 1 else None,
                cause=faults[fault],
                fix="Add readable images to the class, or move its folder elsewhere.",
            )
    if names and not any(kept.values()):
        raise DataError(
            f"no image of {path} can be read", cause=faults[names[0]], fix="Replace the images by readable ones."
        )
    return kept, faults


def split(files: Mapping[str, Sequence[str]], share: float, seed: int) -> tuple[Files, Files]:
    """Split each class: a fraction for validation, rounded down but at least one image.

    The split is that of `choose_validation`.

    Args:
        share: Fraction of each class for validation.

    Returns:
        Training files and validation files.

    Raises:
        DataError: A class has only one image.
    """
    train: Files = {}
    validation: Files = {}
    for name, found in files.items():
        if len(found) < 2:
            raise DataError(
                f"class {name} has only one image, so it cannot be split", fix="Add images, or delete the class."
            )
        chosen = choose_validation(found, share, seed)
        train[name] = [file for file in found if file not in chosen]
        validation[name] = [file for file in found if file in chosen]
    return train, validation


def _paths(images: ImageSet, files: Files) -> Iterator[str]:
    base = os.path.abspath(images.folder)
    return (os.path.normpath(os.path.join(base, file)) for found in files.values() for file in found)


def _select(files: Files, classes: Sequence[str] | None, path: Path) -> Files:
    """Select the classes of data.classes, in that order."""
    if classes is not None:
        missing = [name for name in classes if name not in files]
        if missing:
            raise DataError(
                f"there is no class {missing[0]} in {path}",
                given="data.classes",
                fix=nearest_fix(missing[0], files, "Remove it from data.classes."),
            )
        files = {name: files[name] for name in classes}
    elif marks := [name for name in files if name.casefold() in NO_CLASS]:
        raise DataError(
            f"class {marks[0]} in {path} looks like the mark of images without a class",
            given=f"{len(files[marks[0]]):,} images",
            fix="Leave these images out by data.classes, which lists the classes to use.\n"
            f"If it is a class, list it there too: data.classes=[{', '.join(list(files)[:12])}"
            + (", …]" if len(files) > 12 else "]"),
        )
    if len(files) < 2:
        raise DataError(
            f"{path} has only one class: {', '.join(files)}", allowed="two or more", fix="Add images of another class."
        )
    return files
