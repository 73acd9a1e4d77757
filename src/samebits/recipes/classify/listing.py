"""List the images of a dataset, their classes and the validation split; and open them.

A listing is plain JSON and is stored in the run folder. It does not depend on the order of names in the file system.
"""

from __future__ import annotations

import csv
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samebits.data.images import EncodedImage
from samebits.data.names import (
    ENDINGS,
    choose_validation,
    first_outside,
    is_image,
    outside,
    overlap_rows,
)
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig, no_dataset
from samebits.recipes.classify.rows import (
    NO_CLASS,
    Files,
    ImageRows,
    check_classes,
    in_order,
    kind_of,
    list_folder,
)
from samebits.recipes.listing import find_faults, nearest_fix, read_list, some, whole_path

# Where images come from: class folders, a CSV file of path,label, or rows of a dataset.
#
# A listing has the names of images by class: paths relative to a folder, or indices of rows.


_CSV_COLUMNS = (
    "the path of an image, a comma, its class;\na header line, such as path,label, may stand above"
)
_MAX_CSV_BYTES = 1 << 30
_FIX = "Correct the line, or set data.images to a folder that contains all images."  # in a CSV file


class FileSet:
    """Images in class folders or in a CSV file. `ImageRows` has the same methods.

    Args:
        images: Folder that the paths of a CSV file are relative to. None: its own folder.
    """

    def __init__(self, path: Path, images: Path | None) -> None:
        self._path = path
        self._images = images
        self.folder = path.expanduser().absolute()
        if self.folder.is_file():
            self.folder = self.folder.parent if images is None else images.expanduser().absolute()

    def list_by_class(self, setting: str, left_out: Counter[str], *, mixed: bool = False) -> Files:
        """List the images by class.

        Args:
            left_out: Counts the files of a folder that are not used; see `walk`.
            mixed: Whether the classes of rows may be both numbers and names.

        Raises:
            DataError: The set has another form, is damaged, or an image has no class.
        """
        path = self._path.expanduser()
        # As data.root, another file is more likely an archive of images.
        if path.is_file() and (setting != "data.root" or path.suffix.lower() == ".csv"):
            return read_csv(path, self._images)
        return list_folder(self._path, setting, left_out, are_named=mixed)

    def files(self, names: Iterable[str]) -> list[Path]:
        """Return the paths of the files that hold listed images.

        Raises:
            DataError: A file that was listed at the start of the run is missing.
        """
        names = list(names)
        name = first_outside(names, self.folder, self.folder)
        if name is not None:
            raise outside(name, self.folder, where=None, fix=_FIX)
        paths = [self.folder / name for name in names]
        for path in paths:
            if not os.path.exists(path):
                raise DataError(
                    f"the image {path} is missing",
                    cause=f"it is a link to {os.readlink(path)}"
                    if path.is_symlink()
                    else "it was deleted after the start of the run, or the dataset was moved",
                    fix="Restore it, or set data.root to the folder of the images.",
                )
        return paths

    def encoded(self, name: str) -> EncodedImage:
        """Open an image. Raises DataError if it cannot be read, or is no image."""
        return EncodedImage(self.folder / name)


ImageSet = FileSet | ImageRows


def open_set(path: Path, config: DataConfig) -> ImageSet:
    """Open a path of the settings, whichever form it has.

    Raises:
        ConfigError: A package is not installed, or there are no such columns.
        DataError: Files of rows are missing or damaged.
    """
    if kind_of(path) is None:
        return FileSet(path, config.images)
    return ImageRows(path, config.columns)


def read_csv(path: Path, images: Path | None = None) -> Files:
    """List the images of a CSV file of path,label, with or without a header line.

    Paths are relative to `images`, or else to the folder of the CSV file, and must stay inside of it.

    Raises:
        DataError: A line has another form, or names a missing file.
    """
    files: Files = {}
    folder = FileSet(path, images).folder
    form = "a CSV file of path,label"
    try:
        text = to_utf8(path, read_list(path, _MAX_CSV_BYTES, "Use a readable CSV file.")).decode()
    except DataError as error:
        raise error.with_slots(allowed=f"a folder, or {form}") from None
    try:
        header: tuple[str, str] | None = None
        for row in (reader := csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)):
            where = f"{path}:{reader.line_num}"
            if not row:
                continue
            if len(row) != 2 or not all(cell.strip() for cell in row):
                raise DataError(
                    f"{where} is not of the form path,label",
                    given=",".join(row) or "an empty line",
                    allowed=_CSV_COLUMNS,
                    fix="Correct the line.",
                )
            name, label = (cell.strip() for cell in row)
            if (".." in name or name.startswith(os.sep)) and first_outside(
                [name], folder, folder
            ) is not None:
                raise outside(name, folder, where=where, fix=_FIX)
            found = _existing(folder, name)
            if found is None and reader.line_num == 1 and not is_image(name):
                header = (name, label)  # if no line below has this class
                continue
            if found is None:
                raise _missing(where, name, label, folder)
            files.setdefault(label, []).append(found)
    except csv.Error as error:
        raise DataError(
            f"{path} can't be read: {error}", allowed=form, fix="Use a readable CSV file."
        ) from error
    if not files:
        raise DataError(
            f"{path} names no images",
            allowed="lines such as daisy/a.jpg,daisy",
            fix="Add a line for each image.",
        )
    if header is not None and header[1] in files:  # a class, so the first line is no header
        raise _missing(f"{path}:1", *header, folder)
    check_classes(path, files)
    return {label: sorted(files[label]) for label in in_order(files)}


def _existing(folder: Path, name: str) -> str | None:
    """Return the path of a listed image in a folder: with its ending, and in the Unicode form that the file has."""
    for form in dict.fromkeys(
        [name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]
    ):
        endings = ("",) if is_image(name) else ("", *ENDINGS)
        found = [
            form + ending
            for ending in endings
            if os.path.isfile(os.path.join(folder, form + ending))
        ]
        if len(found) > 1:
            raise DataError(
                f"{name} may be several images",
                given=", ".join(found),
                fix="Write the ending into the CSV file.",
            )
        if found:
            return found[0]
    return None


def _missing(where: str, name: str, label: str, folder: Path) -> DataError:
    """Make the error for a line of a CSV file whose image does not exist."""
    if _existing(folder, label) is not None:
        return DataError(
            f"{where} has the image in its second column: {label}",
            allowed=_CSV_COLUMNS,
            fix="Write the path first, then the class.",
        )
    return DataError(
        f"{where} names a missing image: {folder / name[:200]}",
        allowed=_CSV_COLUMNS,
        fix="Correct the path, or set data.images to the folder that paths are relative to.",
    )


def list_images(config: DataConfig, seed: int) -> dict[str, Any]:
    """List the images of the settings and split them by the seed, if the settings do not name validation images.

    Raises:
        DataError: There are no images, or the splits do not match. The error names the path and the line of a CSV file.
    """
    path = config.path(train=True)
    if path is None:
        raise no_dataset()
    left_out: Counter[str] = Counter()
    images = open_set(path, config)
    setting = config.setting(train=True)
    listed = images.list_by_class(setting, left_out, mixed=config.classes is not None)
    files = _select(listed, config.classes, path)
    usable, skipped = _usable(images, files, config, path, 2 if config.eval is None else 1)
    others = images
    if config.eval is None:
        train, validation = split(usable, config.val_fraction, seed)
    else:
        train = usable
        others = open_set(config.eval, config)
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
    validation = images.list_by_class(
        "data.eval", Counter() if left_out is None else left_out, mixed=True
    )
    unknown = [name for name in validation if name not in classes]
    if unknown and config.classes is None:
        raise DataError(
            f"class {unknown[0]} is in {path}, but not among the training images",
            given=f"classes without training images: {', '.join(unknown[:6])}"
            if len(unknown) > 1
            else None,
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


def _usable(
    images: ImageSet, files: Files, config: DataConfig, path: Path, least: int
) -> tuple[Files, dict[str, str]]:
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
            f"no image of {path} can be read",
            cause=faults[names[0]],
            fix="Replace the images by readable ones.",
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
                f"class {name} has only one image, so it cannot be split",
                fix="Add images, or delete the class.",
            )
        chosen = choose_validation(found, share, seed)
        train[name] = [file for file in found if file not in chosen]
        validation[name] = [file for file in found if file in chosen]
    return train, validation


def _paths(images: ImageSet, files: Files) -> Iterator[str]:
    base = os.path.abspath(images.folder)
    return (
        os.path.normpath(os.path.join(base, file)) for found in files.values() for file in found
    )


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
    elif several := [
        name
        for name in files
        if len(parts := re.split(r"\s*[|;,+/&]\s*|\s+", name)) > 1 and files.keys() >= {*parts}
    ]:
        raise DataError(
            f"class {several[0]} in {path} looks like several labels of an image",
            given=f"{len(several):,} such classes, with {sum(len(files[name]) for name in several):,} images",
            cause="An image has one class here.",
            fix="Leave these images out by data.classes, which lists the classes to use, or write one label for each.\n"
            "If they are classes, list them there too.",
        )
    elif all(re.fullmatch(r"\d+\.0+", name) for name in files):
        raise DataError(
            f"the classes in {path} are numbers with a point, such as {next(iter(files))}",
            cause="A column with empty cells becomes one of decimal numbers in pandas.",
            fix='Write whole numbers: table["label"].astype(int). If they are names, set data.classes to their list.',
        )
    if len(files) < 2:
        raise DataError(
            f"{path} has only one class: {', '.join(files)}",
            allowed="two or more",
            fix=_one_class_fix(path, *files.items()),
        )
    return files


def _one_class_fix(path: Path, only: tuple[str, Sequence[str]]) -> str:
    """Return the fix for a single class: often an archive has wrapped its class folders in another folder."""
    name, found = only
    parts = [file.removeprefix(f"{name}/").split("/") for file in found]
    folders = sorted({first for first, *rest in parts if rest})
    if len(folders) < 2:
        return "Add images of another class."
    return (
        f"If the classes are {some(folders, 6)}, name the folder that has them: {path / name}\n"
        "Otherwise add images of another class."
    )
