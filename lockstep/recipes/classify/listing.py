"""Which images there are, of which class, and which of them are held out.

What is found is plain JSON, is kept with the run, and is the same whatever order the file system gives names in.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.plain_file import read_plain
from lockstep.data.names import first_outside, outside
from lockstep.errors import DataError
from lockstep.recipes.classify.config import DataConfig
from lockstep.recipes.classify.folders import ENDINGS, check_names, is_picture, walk

# What people call the parts of a split to train and to evaluate on; of several, the first is taken.
_HALVES = (("train", "training"), ("val", "valid", "validation", "eval", "test"))

_CSV_COLUMNS = "an image's path, a comma, its class;\na first line that names columns is path,label"

_MAX_CSV_BYTES = 1 << 30
# An evaluation counts which class is taken for which: the square of the number of classes, 8 bytes each.
MAX_CLASSES = 12_000
IMAGES_CURE = "correct the line, or give a folder that all images are in as data.images"

# Class -> files, relative to the folder in which they were listed.
Files = dict[str, list[str]]

# Files, the folder or CSV file that names them, how many of each class are needed -> those of them that can be used.
Choose = Callable[[Files, Path, int], Files]


@dataclass(frozen=True)
class Listing:
    """The images of a dataset.

    Attributes:
        classes: Their names, in the model's order.
        train: To train on.
        held_out: To evaluate on.
    """

    classes: list[str]
    train: Files
    held_out: Files


def take_all(files: Files, path: Path, least: int) -> Files:
    """Take files for good without looking into them."""
    return files


def find_images(config: DataConfig, seed: int, choose: Choose = take_all) -> Listing:
    """List the images that the settings name.

    Args:
        config: The settings.
        seed: Says which images are held out, where that is not said by the settings.
        choose: What to take of them, before any are held out.

    Raises:
        DataError: There is nothing, or it does not fit together; the path, and the line of a CSV file, are named.
    """
    path = config.root or config.train
    if path is None:
        raise DataError(
            "it is not said where the images are",
            fix="data.root=DIR, with a folder of images for each class\n"
            "or data.train=DIR data.eval=DIR, or CSV files of path,label\n"
            "to try without: lockstep data make classify --out DIR",
        )
    listed = list_folder(path, "data.root") if config.train is None else list_either(path, "data.train", config.images)
    found = _chosen(listed, config.classes, path)
    if config.eval is None:
        train, held_out = split(choose(found, path, 2), config.val_fraction, seed)
        return Listing(list(found), train, held_out)
    held_out = list_validation(config.eval, list(found), config.images, restrict=config.classes is not None)
    return Listing(list(found), choose(found, path, 1), choose(held_out, config.eval, 0))


def list_validation(path: Path, classes: Sequence[str], images: Path | None = None, *, restrict: bool = False) -> Files:
    """The validation images of a person's own split.

    Args:
        path: Class folders or a CSV file.
        classes: Those of the training images.
        images: What a CSV file's paths are relative to, if not its own folder.
        restrict: Leave other classes out, instead of complaining.
    """
    held_out = list_either(path, "data.eval", images)
    unknown = [name for name in held_out if name not in classes]
    if unknown and not restrict:
        near = difflib.get_close_matches(unknown[0], classes, n=1)
        raise DataError(
            f"class {unknown[0]} is in {path}, but not among the training images",
            nearest=near[0] if near else None,
            others=", ".join(unknown[1:6]),
            classes=", ".join(classes[:12]) + (" …" if len(classes) > 12 else ""),
        )
    return {name: held_out[name] for name in classes if name in held_out}


def list_either(path: Path, setting: str, images: Path | None = None) -> Files:
    """Class folders, or a CSV file."""
    return read_csv(path.expanduser(), images) if path.expanduser().is_file() else list_folder(path, setting)


def folder_of(path: Path, images: Path | None = None) -> Path:
    """What listed files are relative to: the folder of classes; of a CSV file `images`, or its own folder."""
    path = path.expanduser().absolute()
    if not path.is_file():
        return path
    return path.parent if images is None else images.expanduser().absolute()


def list_folder(folder: Path, setting: str) -> Files:
    """The images in a folder's class folders, also in folders further down; classes and files by name.

    Raises:
        DataError: There are no class folders, or one is empty.
    """
    root = folder.expanduser()
    if root.is_file():
        raise DataError(
            f"{root} is a file, not a folder of class folders",
            given=f"{setting}={folder}",
            fix="unpack it, if it is an archive\nlists of path,label: data.train=train.csv data.eval=eval.csv",
        )
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(
            f"the folder {root} cannot be read: {error.strerror or error}", given=f"{setting}={folder}"
        ) from error
    if not names:
        num_pictures = sum(is_picture(name) for name in os.listdir(root))
        raise DataError(
            f"{root} holds no class folders",
            found=f"{num_pictures:,} images, but no folder says what they are" if num_pictures else "no folders",
            allowed=f"{root}/daisy/a.jpg, {root}/tulips/b.jpg and so on: a folder for each class",
        )
    if {name.lower() for name in names} <= {half for halves in _HALVES for half in halves}:
        raise DataError(
            f"the folders in {root} look like parts of a split, not like classes: {', '.join(names)}",
            fix=_settings_of_halves(root, names),
        )
    check_names(root, names)
    _check_classes(root, names)
    files: Files = {}
    for name in names:
        files[name] = sorted(walk(root, name))
        check_names(root, files[name])
        if not files[name]:
            raise DataError(
                f"the class folder {root / name} holds no images",
                allowed=f"files that end in {', '.join(ENDINGS)}",
                fix="put images into it, or delete it",
            )
    return files


def read_csv(path: Path, images: Path | None = None) -> Files:
    """Images named by a CSV file of path,label, with or without that as its first line.

    Paths are relative to `images`, or else to the CSV file's folder, and do not lead out of it.

    Raises:
        DataError: A line has another form, or names a file that is not there.
    """
    files: Files = {}
    folder = folder_of(path, images)
    try:
        text = read_plain(path, _MAX_CSV_BYTES).decode("utf-8-sig")
        for row in (reader := csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)):
            where = f"{path}:{reader.line_num}"
            if not row or (reader.line_num == 1 and [cell.strip().lower() for cell in row] == ["path", "label"]):
                continue
            if len(row) != 2 or not all(cell.strip() for cell in row):
                raise DataError(
                    f"{where} is not of the form path,label",
                    given=",".join(row) or "an empty line",
                    allowed=_CSV_COLUMNS,
                )
            name, label = (cell.strip() for cell in row)
            if (".." in name or name.startswith(os.sep)) and first_outside([name], folder, folder) is not None:
                raise outside(name, folder, where=where, fix=IMAGES_CURE)
            if not os.path.isfile(os.path.join(folder, name)):
                raise DataError(
                    f"{where} names an image that is not there: {folder / name[:200]}",
                    allowed=_CSV_COLUMNS if reader.line_num == 1 else None,
                )
            files.setdefault(label, []).append(name)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8", allowed="a folder, or a CSV file of path,label") from error
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read: {reason}", allowed="a CSV file of path,label") from error
    if not files:
        raise DataError(f"{path} names no images", allowed="lines such as daisy/a.jpg,daisy")
    _check_classes(path, files)
    return {label: sorted(files[label]) for label in sorted(files)}


def split(files: Mapping[str, Sequence[str]], share: float, seed: int) -> tuple[Files, Files]:
    """Hold a share of each class out, rounded down but at least one image.

    Which ones follows from the seed and each file's own name, so that files that come or go move few others.

    Raises:
        DataError: A class has only one image.
    """
    train: Files = {}
    held_out: Files = {}
    for name, found in files.items():
        if len(found) < 2:
            raise DataError(
                f"class {name} has only one image, so there is none to hold out", fix="add images, or take it away"
            )
        num_held_out = max(1, int(len(found) * share))
        ranked = sorted(found, key=lambda file: hashlib.blake2b(f"{seed}\n{file}".encode(), digest_size=8).digest())
        chosen = set(ranked[:num_held_out])
        train[name] = [file for file in found if file not in chosen]
        held_out[name] = [file for file in found if file in chosen]
    return train, held_out


def num_in_both(listing: Listing, config: DataConfig) -> int:
    """How many validation images are trained on too: the same files, in a split of a person's own."""
    base = config.root or config.train
    if config.eval is None or base is None:
        return 0
    trained = set(_whole_paths(folder_of(base, config.images), listing.train))
    return sum(path in trained for path in _whole_paths(folder_of(config.eval, config.images), listing.held_out))


def _whole_paths(folder: Path, files: Files) -> Iterator[str]:
    base = os.path.abspath(folder)
    return (os.path.normpath(os.path.join(base, file)) for found in files.values() for file in found)


def _chosen(files: Files, classes: Sequence[str] | None, path: Path) -> Files:
    """The classes that were asked for, in that order."""
    if classes is not None:
        missing = [name for name in classes if name not in files]
        if missing:
            near = difflib.get_close_matches(missing[0], files, n=1)
            raise DataError(
                f"there is no class {missing[0]} in {path}", given="data.classes", nearest=near[0] if near else None
            )
        files = {name: files[name] for name in classes}
    if len(files) < 2:
        raise DataError(f"{path} holds only one class: {', '.join(files)}", allowed="two or more")
    return files


def _settings_of_halves(root: Path, names: Sequence[str]) -> str | None:
    """The settings that name the folders of a split; None where one of the two is missing."""
    known = {name.lower(): name for name in names}
    train, held_out = (next((known[half] for half in halves if half in known), None) for halves in _HALVES)
    return None if train is None or held_out is None else f"data.train={root / train} data.eval={root / held_out}"


def _check_classes(place: Path, names: Collection[str]) -> None:
    """Refuse too many classes, and names of several lines: tables and images have one for a class."""
    if len(names) > MAX_CLASSES:
        raise DataError(f"{place} has {len(names):,} classes", allowed=f"up to {MAX_CLASSES:,}")
    for name in names:
        if name.splitlines() != [name]:
            raise DataError(f"the name of a class in {place} has a line break in it: {name!r}", fix="rename it")
