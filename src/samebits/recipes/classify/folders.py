"""List the image files in a class folder and its subfolders, by their names."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from samebits.data.names import ENDINGS, check_names, count_left_out, is_image, is_of_system, left_out_row, walk
from samebits.data.sources.plain_text import is_invisible
from samebits.errors import DataError, cannot_read
from samebits.recipes.listing import some

# Common names of the folders of a training and a validation split. The first that exists is used.
_HALVES = (("train", "training"), ("val", "valid", "validation", "eval", "test"))

# More classes than any dataset has (ImageNet-21k: 21,841), fewer than a column of unique names.
MAX_CLASSES = 50_000
_MAX_DIGITS = 10
NO_CLASS = ("-1", "nan", "null", "<na>")  # as torchvision and Hugging Face mark a missing class, and as pandas does

# Class -> files, relative to the folder in which they were listed; or indices of rows.
Files = dict[str, list[str]]

# Files that `save_to_disk` of Hugging Face datasets writes into a folder.
_DATASETS = ("state.json", "dataset_dict.json")


def kind_of(path: Path) -> Literal["tar", "parquet", "datasets"] | None:
    """Return in which form a path has rows instead of image files; None if it has none.

    Tar shards and Parquet files are named by a file, a pattern such as `train-*.tar`, or a folder that has them.
    """
    path = path.expanduser()
    for kind in ("tar", "parquet"):
        if path.name.endswith((f".{kind}", f".{kind}}}")) and not path.is_dir():
            return kind
    try:
        names = os.listdir(path)
    except OSError:
        return None
    if any(name in names for name in _DATASETS):
        return "datasets"
    endings = {name.rpartition(".")[2] for name in names if name[0] != "."}
    return "tar" if "tar" in endings else "parquet" if "parquet" in endings else None


def list_folder(folder: Path, setting: str, left_out: Counter[str] | None = None) -> Files:
    """List the images in class folders and their subfolders, sorted by name.

    Args:
        left_out: Counts the files that are not used; see `walk`.

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
        folders = [entry.name for entry in os.scandir(root) if entry.is_dir()]
        names = sorted(name for name in folders if not is_of_system(name))
        count_left_out(root, folders, (), left_out)
    except OSError as error:
        fix = f"Set {setting} to a readable folder."
        raise cannot_read(DataError, f"the folder {root}", error, fix, given=f"{setting}={folder}") from error
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
        counts: Counter[str] = Counter()
        files[name] = sorted(walk(root, name, counts))
        check_names(root, files[name])
        if left_out is not None:
            left_out.update(counts)
        if not files[name]:
            raise DataError(
                f"the class folder {root / name} contains no images",
                given=left_out_row(counts) or None,
                allowed=f"files that end in {', '.join(ENDINGS)}",
                fix=f"Add images to it, move it out of {root}, or use another dataset folder.",
            )
    return files


def is_number(name: str) -> bool:
    """Return whether the name of a class is a whole number from 0."""
    return name.isascii() and name.isdigit() and len(name) < _MAX_DIGITS


def in_order(names: Collection[str]) -> list[str]:
    """Sort the classes of rows and CSV files: whole numbers by value if all are, or else by name.

    Class folders are always sorted by name, as by torchvision's ImageFolder. So weights that were trained with it keep
    the meaning of their outputs.
    """
    return sorted(names, key=int) if all(map(is_number, names)) else sorted(names)


def order_row(classes: Sequence[str]) -> str:
    """Describe the order of numbered classes of a model, for the head of a run; empty if there is only one order."""
    numbers = [name for name in classes if is_number(name)]
    if numbers and len(numbers) < len(classes):
        other = next(name for name in classes if not is_number(name))
        num_names = len(classes) - len(numbers)
        return f"{len(numbers):,} whole numbers, such as {numbers[0]}, and {num_names:,} names, such as {other}"
    by_name, by_value = sorted(classes), sorted(numbers, key=int)
    if not numbers or by_name == by_value or list(classes) not in (by_name, by_value):
        return ""
    way = "sorted as text, as by torchvision's ImageFolder" if list(classes) == by_name else "sorted by value"
    return f"{some(classes, 12)} ({way}; data.classes sets another order)"


def check_classes(path: Path, names: Collection[str]) -> None:
    """Refuse too many classes, names with invisible characters such as line breaks, and names that look the same.

    Args:
        path: The folder or CSV file that has them, for errors.
    """
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{path} has {len(names):,} classes",
            allowed=f"at most {MAX_CLASSES:,}",
            fix="Check that labels are classes, not unique names.",
        )
    seen: dict[str, str] = {}
    for name in names:
        if not name or any(map(is_invisible, name)):
            raise DataError(f"a class name in {path} has an invisible character: {name!r}", fix="Rename it.")
        # As macOS and others write é, and as 7 and 07 are the same number.
        key = unicodedata.normalize("NFC", " ".join(name.split()))
        other = seen.setdefault(str(int(key)) if is_number(key) else key, name)
        if other != name:
            raise DataError(
                f"two classes in {path} look the same",
                given=f"{other!a} and {name!a}",
                fix="Rename one, so that they are one class or differ.",
            )


def _split_settings(root: Path, names: Sequence[str]) -> str:
    """Return a fix with the settings that name the folders of a split."""
    known = {name.lower(): name for name in names}
    train, validation = (next((known[half] for half in halves if half in known), None) for halves in _HALVES)
    if train is None or validation is None:
        return f"Set data.root to one of these folders, such as {root / names[0]}."
    return f"Set data.train={root / train} data.eval={root / validation}"
