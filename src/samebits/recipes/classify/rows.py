"""Images of a dataset in the order of their names: files in class folders, tar shards and Parquet files."""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from samebits.data.images import EncodedImage
from samebits.data.names import (
    ENDINGS,
    check_names,
    is_image,
    is_of_system,
    left_out_row,
    walk,
)
from samebits.data.sources.decoding import encoded_content
from samebits.data.sources.local_files import find_files, open_regular
from samebits.data.sources.parquet_rows import ParquetRows, reading, require_pyarrow
from samebits.data.sources.plain_text import is_invisible
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import ConfigError, DataError, cannot_read
from samebits.plain_file import MAX_MEMORY_BYTES, parse_json
from samebits.recipes.listing import some

# List the image files in a class folder and its subfolders, by their names.


# Common words in the names of the folders of a training and a validation split. The first that exists is used.
_HALVES = (("train", "training"), ("val", "valid", "validation", "eval", "test"))
# Other words that name a part of a dataset.
_PARTS = ("fold", "split", "part", "pred", "prediction", "dev", "testing", "holdout", "unlabeled")

# More classes than any dataset has (ImageNet-21k: 21,841), fewer than a column of unique names.
MAX_CLASSES = 50_000
_MAX_DIGITS = 10
# as torchvision and Hugging Face mark a missing class, and as pandas does
NO_CLASS = "-1", "nan", "null", "<na>"

# Class -> files, relative to the folder in which they were listed; or indices of rows.
Files = dict[str, list[str]]

# Files that `save_to_disk` of Hugging Face datasets writes into a folder.
_KINDS = ("tar", "parquet")  # endings of files with rows
_DATASETS = ("state.json", "dataset_dict.json")


def kind_of(path: Path) -> str | None:
    """Return in which form a path has rows instead of image files; None if it has none.

    Tar shards and Parquet files are named by a file, a pattern such as `train-*.tar`, or a folder that has them.

    Raises:
        ConfigError: The folder is a Hugging Face dataset on disk.
    """
    path = path.expanduser()
    for kind in _KINDS:
        if path.name.endswith((f".{kind}", f".{kind}}}")) and not path.is_dir():
            return kind
    try:
        names = os.listdir(path)
    except OSError:
        return None
    if any(name in names for name in _DATASETS):
        raise ConfigError(
            f"{path} is a Hugging Face dataset in the form of save_to_disk, which is not read",
            fix="Write it, or each of its splits, as Parquet, and set data.root, or data.train and data.eval:\n"
            f'  datasets.load_from_disk("{path}").to_parquet("train.parquet")',
        )
    endings = {name.rpartition(".")[2] for name in names if name[0] != "."}
    return next((kind for kind in _KINDS if kind in endings), None)


def list_folder(
    folder: Path, setting: str, left_out: Counter[str] | None = None, *, are_named: bool = False
) -> Files:
    """List the images in class folders and their subfolders, sorted by name.

    Args:
        left_out: Counts the files that are not used; see `walk`.
        are_named: Whether the user has named the classes, as data.classes does.

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
    except OSError as error:
        fix = f"Set {setting} to a readable folder."
        raise cannot_read(
            DataError, f"the folder {root}", error, fix, given=f"{setting}={folder}"
        ) from error
    if not names:
        num_images = sum(is_image(name) for name in os.listdir(root))
        raise DataError(
            f"{root} contains no class folders",
            given=f"{num_images:,} images outside of class folders" if num_images else "no folders",
            allowed=f"{root}/daisy/a.jpg, {root}/tulips/b.jpg and so on: a folder for each class",
            fix="Move the images of each class into a folder named after the class.",
        )
    check_names(root, names)
    check_classes(root, names)
    # os.walk() leaves out a folder that cannot be read: it has no images then.
    inner = [set(next(os.walk(root / name), ("", [], []))[1]) for name in names]
    # A test set without classes cannot be evaluated on.
    with_folders = [name for name, inside in zip(names, inner, strict=True) if inside]
    if not are_named and all(map(_is_part, names)):
        raise DataError(
            f"the folders in {root} look like a split, not like classes: {', '.join(names)}",
            fix=_split_settings(root, with_folders or names),
        )
    if (
        not are_named
        and len(names) > 1
        and inner[0]
        and all(inner)
        and all(map(_is_part, set[str]().union(*inner)))
    ):
        first = root / names[0] / sorted(inner[0])[0]
        raise DataError(
            f"each class folder in {root} has a split of its own: {', '.join(sorted(inner[0]))}",
            given=f"{first} and others",
            cause="They would become one set, with test images in training.",
            fix="Put the split above the classes: train/daisy, test/daisy; then set data.train and data.eval.\n"
            "To use all images in one set, set data.classes to the list of classes.",
        )
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


def _words(name: str) -> list[str]:
    return re.findall("[a-z]+", name.lower())


def _is_part(name: str) -> bool:
    """Return whether a folder's name is that of a part of a dataset, such as training_set or fold_1."""
    return any(word in (*_HALVES[0], *_HALVES[1], *_PARTS) for word in _words(name))


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
    by_name = sorted(classes)
    by_value = sorted(numbers, key=int)
    if not numbers or by_name == by_value or list(classes) not in (by_name, by_value):
        return ""
    way = (
        "sorted as text, as by torchvision's ImageFolder"
        if list(classes) == by_name
        else "sorted by value"
    )
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
            raise DataError(
                f"a class name in {path} has an invisible character: {name!r}", fix="Rename it."
            )
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
    known = {word: name for name in reversed(names) for word in _words(name)}
    classes = "\nIf they are classes, set data.classes to their list."
    train, validation = (
        next((known[half] for half in halves if half in known), None) for halves in _HALVES
    )
    if train is None or validation is None:
        return f"Set data.root to one of these folders, such as {root / names[0]}.{classes}"
    return f"Set data.train={root / train} data.eval={root / validation}{classes}"


# Images in rows, each with its class: tar shards and Parquet files.
#
# A listing has the index of a row where that of a folder has the name of a file.


# The usual names of the columns, the most common first.
IMAGES = ("image", "img", "picture", "photo")
LABELS = ("label", "labels", "fine_label", "class", "cls", "target", "category")
_EXTENSIONS = tuple(ending.removeprefix(".") for ending in ENDINGS)
_LABEL_EXTENSIONS = ("cls", "class", "label", "txt")

# As Hugging Face's datasets name the files of a set: train-00000-of-00002.parquet.
_SET = re.compile(r"(train|test|val|valid|validation|dev|eval)(?:[-_.]|\d)", re.IGNORECASE)

Columns = tuple[str, str] | None


class ImageRows:
    """The rows of a dataset: an encoded image and a class each; see `FileSet`.

    Args:
        path: Tar shards or Parquet files as a file, a folder or a pattern.
        columns: Names of the columns of image and class; extensions in tar shards. None: the usual ones.

    Raises:
        ConfigError: pyarrow is not installed, or there are no such columns.
        DataError: The files are missing or damaged.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path = path
        self.folder = path.expanduser().absolute()
        self._names: list[str] | None = None  # of integer classes, if the files have them
        self._images: TarShards | ParquetRows
        self._labels: TarShards | ParquetRows
        if kind_of(path) == "tar":
            _check_files(path, find_files(str(path), ".tar"))
            image, label = columns or (";".join(_EXTENSIONS), ";".join(_LABEL_EXTENSIONS))
            keep = dict.fromkeys([*image.lower().split(";"), *label.lower().split(";")], bytes)
            self._images, self._labels = (
                TarShards(str(path), (each,), decode=keep) for each in (image, label)
            )
        else:
            files = find_files(str(path), ".parquet")
            _check_files(path, files)
            image, label = self._choose(files[0], columns)
            self._images, self._labels = (
                ParquetRows(str(path), (each,)) for each in (image, label)
            )

    def list_by_class(self, setting: str, left_out: Counter[str], *, mixed: bool = False) -> Files:
        """See `FileSet.list_by_class`. Rows are in the order of the classes' numbers, or else of their names."""
        found: Files = {}
        for index in range(len(self._labels)):
            found.setdefault(self._class(index), []).append(str(index))
        files = {
            name: found[name]
            for name in self._names or self._in_order(found, mixed=mixed)
            if name in found
        }
        check_classes(self._path, files)
        return files

    def _in_order(self, found: Files, *, mixed: bool) -> list[str]:
        numbers = [name for name in found if is_number(name)]
        names = [name for name in found if not is_number(name) and name.casefold() not in NO_CLASS]
        if numbers and names and not mixed:
            raise DataError(
                f"{self._path} has both numbers and names as classes",
                given="\n".join(
                    f"row {int(found[each[0]][0]):,}: {each[0]}" for each in (numbers, names)
                ),
                cause="A class that one file numbers and another names would become two.",
                fix="Write the same in all files. If all of them are classes, set data.classes to their list.",
            )
        return in_order(found)

    def files(self, names: Iterable[str]) -> list[Path]:
        """Return the paths of the files that hold the rows; see `FileSet`."""
        return [Path(file) for file in self._images.files]

    def encoded(self, name: str) -> EncodedImage:
        """Return the encoded image of a row; see `FileSet`."""
        shown = f"row {int(name):,} of {self._path}"
        return EncodedImage(shown, encoded_content(self._images[int(name)][0], shown))

    def _class(self, index: int) -> str:
        value = self._labels[index][0]
        if isinstance(value, bytes):
            with suppress(UnicodeDecodeError):  # bytes are refused below
                value = value.decode("utf-8-sig")
        if isinstance(value, str) and value.strip():
            return value.strip()
        text = repr(value)[:60] if isinstance(value, str | bytes | int | float | None) else ""
        least, most = (-1, 1 << 31) if self._names is None else (0, len(self._names))
        if isinstance(value, int) and not isinstance(value, bool) and least <= value < most:
            return str(value) if self._names is None else self._names[value]
        raise DataError(
            f"row {index:,} of {self._path} has a class that is not understood",
            given=f"a {type(value).__name__}" + (f": {text}" if text else ""),
            allowed="the name of a class in UTF-8, or a number from 0"
            + ("" if self._names is None else f" to {most - 1}"),
            fix="Correct the row, or set data.columns to the columns of image and class.",
        )

    def _choose(self, file: str, columns: Columns) -> tuple[str, str]:
        """Return the names of a Parquet file's columns of image and class, and keep those of its classes."""
        require_pyarrow()
        import pyarrow.parquet

        with reading(file):
            schema = pyarrow.parquet.read_schema(file)
        names = schema.names
        image, label = columns or (
            next((each for each in usual if each in names), "") for usual in (IMAGES, LABELS)
        )
        for name, what in ((image, "images"), (label, "classes")):
            if name not in names:
                raise ConfigError(
                    f"{self._path} has no column {name}"
                    if name
                    else f"the column of {what} in {self._path} is unknown",
                    given=f"columns: {', '.join(names)}",
                    fix="Set data.columns=[IMAGE, CLASS] to two of these columns.",
                )
        self._names = _names_in(schema.metadata or {}, label)
        return image, label


def _check_files(path: Path, files: Sequence[str]) -> None:
    """Refuse a FIFO, which would wait for a writer, and files of several sets: training and test rows would be one."""
    for file in files:
        os.close(open_regular(file))
    sets = {
        match[1].lower(): file for file in files if (match := _SET.match(os.path.basename(file)))
    }
    if len(sets) > 1:
        folder = path if path.is_dir() else path.parent
        ending = files[0].rpartition(".")[2]
        names = sorted(sets, key=lambda name: name != "train")
        raise ConfigError(
            f"{path} has files of several sets: {', '.join(names)}",
            given="\n".join(sets[name] for name in names),
            cause="They would become one set, with test samples in training.",
            fix=f"Set data.train='{folder}/{names[0]}*.{ending}' and data.eval='{folder}/{names[1]}*.{ending}'.",
        )


def _names_in(metadata: Mapping[bytes, bytes], label: str) -> list[str] | None:
    """Return the names of the classes that Hugging Face stores in a Parquet file; None if it has none."""
    try:
        names = parse_json(metadata[b"huggingface"], MAX_MEMORY_BYTES)["info"]["features"][label][
            "names"
        ]
    except (KeyError, TypeError, ValueError):
        return None
    return (
        names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
    )
