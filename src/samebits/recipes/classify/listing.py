"""List the images of a dataset, their classes and the validation split.

A listing is plain JSON and is stored in the run folder. It does not depend on the order of names in the file system.
"""

from __future__ import annotations

import csv
import difflib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samebits.config.plain_file import read_plain
from samebits.data.names import choose_validation, first_outside, outside, overlap_rows
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig, no_dataset
from samebits.recipes.classify.folders import (
    IMAGES_FIX,
    NO_CLASS,
    Files,
    check_classes,
    folder_of,
    in_order,
    kind_of,
    list_folder,
)

_CSV_COLUMNS = "the path of an image, a comma, its class;\na header line, if any, is path,label"

_MAX_CSV_BYTES = 1 << 30

# (files, the folder or CSV file that names them, images needed per class) -> the usable files.
Choose = Callable[[Files, Path, int], Files]


@dataclass(frozen=True)
class Listing:
    """The images of a dataset."""

    classes: list[str]  #: Names of the classes, in the order of the model's outputs.
    train: Files  #: Training images.
    validation: Files  #: Validation images.
    left_out: Mapping[str, int]  #: Number of files that are not used, by their ending or folder.
    warnings: Mapping[str, str]  #: Rows about images that are in several places, for the header of a run.


def take_all(files: Files, path: Path, least: int) -> Files:
    """Return all files without reading them.

    Args:
        files: The files, by class.
        path: The folder or CSV file that lists them; not used.
        least: Number of usable files that are needed; not checked.
    """
    return files


def find_images(config: DataConfig, seed: int, choose: Choose = take_all) -> Listing:
    """List the images of the settings and split them.

    Args:
        config: The settings.
        seed: Selects the validation images, if the settings do not name them.
        choose: Selects the usable files before the split.

    Raises:
        DataError: There are no images, or the splits do not match. The error names the path and the line of a CSV file.
    """
    path = config.root or config.train
    if path is None:
        raise no_dataset()
    setting = "data.root" if config.train is None else "data.train"
    left_out: Counter[str] = Counter()
    if config.train is None and kind_of(path) is None and path.suffix.lower() != ".csv":
        listed = list_folder(path, setting, left_out)
    else:
        listed = list_either(path, setting, config.images, config.columns, left_out, mixed=config.classes is not None)
    files = _select(listed, config.classes, path)
    if config.eval is None:
        train, validation = split(choose(files, path, 2), config.val_fraction, seed)
        folders = (folder_of(path, config.images),) * 2
    else:
        validation = list_validation(
            config.eval,
            list(files),
            config.images,
            config.columns,
            restrict=config.classes is not None,
            left_out=left_out,
        )
        train, validation = choose(files, path, 1), choose(validation, config.eval, 0)
        folders = (folder_of(path, config.images), folder_of(config.eval, config.images))
    warnings = overlap_rows(_whole_paths(folders[0], train), _whole_paths(folders[1], validation))
    return Listing(list(files), train, validation, left_out, warnings)


def list_validation(
    path: Path,
    classes: Sequence[str],
    images: Path | None = None,
    columns: tuple[str, str] | None = None,
    *,
    restrict: bool = False,
    left_out: Counter[str] | None = None,
) -> Files:
    """List the validation images of data.eval.

    Args:
        path: Class folders or a CSV file.
        classes: Classes of the training images.
        images: Folder that the paths of a CSV file are relative to. None: its own folder.
        columns: Columns of image and class in rows. None: the usual ones.
        restrict: Leave other classes out instead of raising an error.
        left_out: Counts the files that are not used; see `walk`.

    Raises:
        DataError: A class is not among the training images.
    """
    validation = list_either(path, "data.eval", images, columns, left_out, mixed=True)
    unknown = [name for name in validation if name not in classes]
    if unknown and not restrict:
        near = difflib.get_close_matches(unknown[0], classes, n=1)
        raise DataError(
            f"class {unknown[0]} is in {path}, but not among the training images",
            given=f"classes without training images: {', '.join(unknown[:6])}" if len(unknown) > 1 else None,
            allowed=", ".join(classes[:12]) + (" …" if len(classes) > 12 else ""),
            fix=f"Rename the class to {near[0]}."
            if near
            else "Add training images of this class, or set data.classes.",
        )
    return {name: validation[name] for name in classes if name in validation}


def list_either(
    path: Path,
    setting: str,
    images: Path | None = None,
    columns: tuple[str, str] | None = None,
    left_out: Counter[str] | None = None,
    *,
    mixed: bool = False,
) -> Files:
    """List class folders, a CSV file or rows, whichever the path is.

    Args:
        path: Class folders, a CSV file, or files with rows.
        setting: The setting that names it, for errors.
        images: Folder that the paths of a CSV file are relative to. None: its own folder.
        columns: Columns of image and class in rows. None: the usual ones.
        left_out: Counts the files of a folder that are not used; see `walk`.
        mixed: Whether the classes of rows may be both numbers and names.
    """
    if kind_of(path) is not None:
        from samebits.recipes.classify.rows import list_rows  # imported late, because most datasets are folders

        return list_rows(path, columns, mixed=mixed)
    return read_csv(path.expanduser(), images) if path.expanduser().is_file() else list_folder(path, setting, left_out)


def read_csv(path: Path, images: Path | None = None) -> Files:
    """List the images of a CSV file of path,label, with or without a header line.

    Paths are relative to `images`, or else to the folder of the CSV file, and must stay inside of it.

    Raises:
        DataError: A line has another form, or names a missing file.
    """
    files: Files = {}
    folder = folder_of(path, images)
    try:
        text = _csv_text(path)
        for row in (reader := csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)):
            where = f"{path}:{reader.line_num}"
            if not row or (reader.line_num == 1 and [cell.strip().lower() for cell in row] == ["path", "label"]):
                continue
            if len(row) != 2 or not all(cell.strip() for cell in row):
                raise DataError(
                    f"{where} is not of the form path,label",
                    given=",".join(row) or "an empty line",
                    allowed=_CSV_COLUMNS,
                    fix="Correct the line.",
                )
            name, label = (cell.strip() for cell in row)
            if (".." in name or name.startswith(os.sep)) and first_outside([name], folder, folder) is not None:
                raise outside(name, folder, where=where, fix=IMAGES_FIX)
            if not os.path.isfile(os.path.join(folder, name)):
                raise DataError(
                    f"{where} names a missing image: {folder / name[:200]}",
                    allowed=_CSV_COLUMNS if reader.line_num == 1 else None,
                    fix="Correct the path, or set data.images to the folder that paths are relative to.",
                )
            files.setdefault(label, []).append(name)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path} can't be read: {reason}", allowed="a CSV file of path,label", fix="Use a readable CSV file."
        ) from error
    if not files:
        raise DataError(
            f"{path} names no images", allowed="lines such as daisy/a.jpg,daisy", fix="Add a line for each image."
        )
    check_classes(path, files)
    return {label: sorted(files[label]) for label in in_order(files)}


def _csv_text(path: Path) -> str:
    try:
        return to_utf8(path, read_plain(path, _MAX_CSV_BYTES)).decode()
    except DataError as error:
        raise error.with_slots(allowed="a folder, or a CSV file of path,label") from None


def split(files: Mapping[str, Sequence[str]], share: float, seed: int) -> tuple[Files, Files]:
    """Split each class: a fraction for validation, rounded down but at least one image.

    The split is that of `choose_validation`.

    Args:
        files: Files by class.
        share: Fraction of each class for validation.
        seed: The seed of the run.

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


def _whole_paths(folder: Path, files: Files) -> Iterator[str]:
    base = os.path.abspath(folder)
    return (os.path.normpath(os.path.join(base, file)) for found in files.values() for file in found)


def _select(files: Files, classes: Sequence[str] | None, path: Path) -> Files:
    """Select the classes of data.classes, in that order."""
    if classes is not None:
        missing = [name for name in classes if name not in files]
        if missing:
            near = difflib.get_close_matches(missing[0], files, n=1)
            raise DataError(
                f"there is no class {missing[0]} in {path}",
                given="data.classes",
                fix=f"Use {near[0]}." if near else "Remove it from data.classes.",
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
