"""Images in rows, each with its class: tar shards, Parquet files, and Hugging Face datasets on disk.

A listing has the index of a row where that of a folder has the name of a file.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from samebits.config.plain_file import MAX_MEMORY_BYTES, parse_json
from samebits.data.images import EncodedImage
from samebits.data.names import ENDINGS
from samebits.data.sources.decoding import encoded_content
from samebits.data.sources.local_files import find_files, open_regular
from samebits.data.sources.parquet_rows import ParquetRows, require_pyarrow
from samebits.data.sources.tar_shards import TarShards
from samebits.errors import ConfigError, DataError
from samebits.recipes.classify.folders import NO_CLASS, Files, check_classes, in_order, is_number, kind_of

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
        path: Tar shards or Parquet files as a file, a folder or a pattern; or a folder that `save_to_disk` has written.
        columns: Names of the columns of image and class; extensions in tar shards. None: the usual ones.

    Raises:
        ConfigError: A package is not installed, or there are no such columns.
        DataError: The files are missing or damaged.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self.folder = path, path.expanduser().absolute()
        self._names: list[str] | None = None  # of integer classes, if the files have them
        kind = kind_of(path)
        if kind in ("tar", "parquet"):
            _check_files(path, find_files(str(path), f".{kind}"))
        self._images, self._labels, self._files = {
            "tar": self._open_tar, "parquet": self._open_parquet, "datasets": self._open_datasets,
        }[kind or "tar"](columns)  # fmt: skip

    def list_by_class(self, setting: str, left_out: Counter[str], *, mixed: bool = False) -> Files:
        """See `FileSet.list_by_class`. Rows are in the order of the classes' numbers, or else of their names."""
        found: Files = {}
        for index in range(len(self._labels)):
            found.setdefault(self._class(index), []).append(str(index))
        files = {name: found[name] for name in self._names or self._in_order(found, mixed=mixed) if name in found}
        check_classes(self._path, files)
        return files

    def _in_order(self, found: Files, *, mixed: bool) -> list[str]:
        numbers = [name for name in found if is_number(name)]
        names = [name for name in found if not is_number(name) and name.casefold() not in NO_CLASS]
        if numbers and names and not mixed:
            raise DataError(
                f"{self._path} has both numbers and names as classes",
                given="\n".join(f"row {int(found[each[0]][0]):,}: {each[0]}" for each in (numbers, names)),
                cause="A class that one file numbers and another names would become two.",
                fix="Write the same in all files. If all of them are classes, set data.classes to their list.",
            )
        return in_order(found)

    def files(self, names: Iterable[str]) -> list[Path]:
        """Return the paths of the files that hold the rows; see `FileSet`."""
        return [Path(file) for file in self._files]

    def encoded(self, name: str) -> EncodedImage:
        """Return the encoded image of a row; see `FileSet`."""
        shown = f"row {int(name):,} of {self._path}"
        return EncodedImage(shown, encoded_content(self._images[int(name)], shown))

    def _class(self, index: int) -> str:
        value = self._labels[index]
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

    def _open_tar(self, columns: Columns) -> tuple[Any, Any, list[str]]:
        image, label = columns or (";".join(_EXTENSIONS), ";".join(_LABEL_EXTENSIONS))
        keep = dict.fromkeys([*image.lower().split(";"), *label.lower().split(";")], bytes)
        images, labels = (TarShards(str(self._path), (each,), decode=keep) for each in (image, label))
        return _Values(images, 0), _Values(labels, 0), images.files

    def _open_parquet(self, columns: Columns) -> tuple[Any, Any, list[str]]:
        require_pyarrow()
        import pyarrow
        import pyarrow.parquet

        first = find_files(str(self._path), ".parquet")[0]
        try:
            schema = pyarrow.parquet.read_schema(first)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{first} can't be read as Parquet", cause=error, fix="Copy or download the file again."
            ) from error
        image, label = self._choose(schema.names, columns)
        self._names = _names_in(schema.metadata or {}, label)
        images, labels = (ParquetRows(str(self._path), (each,)) for each in (image, label))
        return _Values(images, 0), _Values(labels, 0), images.files

    def _open_datasets(self, columns: Columns) -> tuple[Any, Any, list[str]]:
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                f"{self._path} is a Hugging Face dataset, which requires the package datasets",
                fix='Run pip install "samebits[datasets]".',
            ) from None
        try:
            found = datasets.load_from_disk(str(self._path.expanduser()))
        except Exception as error:  # of damaged files, the library raises many types
            raise DataError(
                f"{self._path} can't be read as a Hugging Face dataset",
                cause=str(error) or type(error).__name__,
                fix="Write it again with save_to_disk.",
            ) from error
        if not isinstance(found, datasets.DatasetDict):
            found = found.with_format(None)  # saved with it, a dataset returns tensors or arrays of any column
        else:
            splits = list(found)
            raise DataError(
                f"{self._path} has splits, not rows",
                given=", ".join(splits),
                fix=f"Set data.train={self._path / splits[0]} data.eval={self._path / splits[-1]}",
            )
        image, label = self._choose(found.column_names, columns)
        self._names = getattr(found.features[label], "names", None)
        if isinstance(found.features[image], datasets.Image):
            found = found.cast_column(image, datasets.Image(decode=False))
        files = [entry["filename"] for entry in found.cache_files]
        return _Values(found.select_columns([image]), image), list(found[label]), files

    def _choose(self, names: Sequence[str], columns: Columns) -> tuple[str, str]:
        """Return the names of the columns of image and class."""
        chosen = columns or tuple(next((each for each in usual if each in names), "") for usual in (IMAGES, LABELS))
        for name, what in zip(chosen, ("images", "classes"), strict=True):
            if name not in names:
                raise ConfigError(
                    f"{self._path} has no column {name}"
                    if name
                    else f"the column of {what} in {self._path} is unknown",
                    given=f"columns: {', '.join(names)}",
                    fix="Set data.columns=[IMAGE, CLASS] to two of these columns.",
                )
        return chosen[0], chosen[1]


class _Values:
    """A value of each sample of a dataset of tuples or dicts."""

    def __init__(self, source: Any, key: int | str) -> None:
        self._source, self._key = source, key

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._source[index][self._key]


def _check_files(path: Path, files: Sequence[str]) -> None:
    """Refuse a FIFO, which would wait for a writer, and files of several sets: training and test rows would be one."""
    for file in files:
        os.close(open_regular(file))
    sets = {match[1].lower(): file for file in files if (match := _SET.match(os.path.basename(file)))}
    if len(sets) > 1:
        folder, ending = path if path.is_dir() else path.parent, files[0].rpartition(".")[2]
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
        names = parse_json(metadata[b"huggingface"], MAX_MEMORY_BYTES)["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None
