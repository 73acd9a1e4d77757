"""Where images come from: class folders, a CSV file of path,label, or rows of a dataset.

A listing has the names of images by class: paths relative to a folder, or indices of rows.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from samebits.data.images import EncodedImage
from samebits.data.names import first_outside, outside
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.folders import Files, check_classes, in_order, kind_of, list_folder
from samebits.recipes.listing import read_list

if TYPE_CHECKING:
    from samebits.recipes.classify.rows import ImageRows

_CSV_COLUMNS = "the path of an image, a comma, its class;\na header line, if any, is path,label"
_MAX_CSV_BYTES = 1 << 30
_FIX = "Correct the line, or set data.images to a folder that contains all images."  # in a CSV file
ImageSet: TypeAlias = "FileSet | ImageRows"


class FileSet:
    """Images in class folders or in a CSV file. `ImageRows` has the same methods.

    Args:
        images: Folder that the paths of a CSV file are relative to. None: its own folder.
    """

    def __init__(self, path: Path, images: Path | None) -> None:
        self._path, self._images = path, images
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
        return list_folder(self._path, setting, left_out)

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
        missing = next((path for path in paths if not os.path.exists(path)), None)
        if missing is not None:
            raise DataError(
                f"the image {missing} is missing",
                cause=f"it is a link to {os.readlink(missing)}"
                if missing.is_symlink()
                else "it was deleted after the start of the run, or the dataset was moved",
                fix="Restore it, or set data.root to the folder of the images.",
            )
        return paths

    def encoded(self, name: str) -> EncodedImage:
        """Open an image. Raises DataError if it cannot be read, or is no image."""
        return EncodedImage(self.folder / name)


def open_set(path: Path, config: DataConfig) -> ImageSet:
    """Open a path of the settings, whichever form it has.

    Raises:
        ConfigError: A package is not installed, or there are no such columns.
        DataError: Files of rows are missing or damaged.
    """
    if kind_of(path) is None:
        return FileSet(path, config.images)
    from samebits.recipes.classify.rows import ImageRows  # imported late, because most datasets are folders

    return ImageRows(path, config.columns)


def read_csv(path: Path, images: Path | None = None) -> Files:
    """List the images of a CSV file of path,label, with or without a header line.

    Paths are relative to `images`, or else to the folder of the CSV file, and must stay inside of it.

    Raises:
        DataError: A line has another form, or names a missing file.
    """
    files: Files = {}
    folder, form = FileSet(path, images).folder, "a CSV file of path,label"
    try:
        text = to_utf8(path, read_list(path, _MAX_CSV_BYTES, "Use a readable CSV file.")).decode()
    except DataError as error:
        raise error.with_slots(allowed=f"a folder, or {form}") from None
    try:
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
                raise outside(name, folder, where=where, fix=_FIX)
            if not os.path.isfile(os.path.join(folder, name)):
                raise DataError(
                    f"{where} names a missing image: {folder / name[:200]}",
                    allowed=_CSV_COLUMNS if reader.line_num == 1 else None,
                    fix="Correct the path, or set data.images to the folder that paths are relative to.",
                )
            files.setdefault(label, []).append(name)
    except csv.Error as error:
        raise DataError(f"{path} can't be read: {error}", allowed=form, fix="Use a readable CSV file.") from error
    if not files:
        raise DataError(
            f"{path} names no images", allowed="lines such as daisy/a.jpg,daisy", fix="Add a line for each image."
        )
    check_classes(path, files)
    return {label: sorted(files[label]) for label in in_order(files)}
