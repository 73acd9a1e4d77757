"""Read label files of any format, which may be a stranger's, and LMDB labels.

Millions of lines are stored as a few arrays, which DataLoader workers share, instead of millions of strings.
"""

import functools
import io
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from samebits.data.images import MAX_FILE_BYTES, too_large
from samebits.data.keyed import IntArray
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.extras import require
from samebits.plain_file import short_path
from samebits.recipes.listing import read_list, some
from samebits.recipes.text.alphabet import CodeArray, normalize_text, read_chars, text_of
from samebits.recipes.text.config import DataConfig

# Read LMDB datasets in the common layout: `num-samples`, `image-000000001`, `label-000000001` and so on.


_MAX_ENTRY_DIGITS = 9  # digits in the names of entries
_MAX_LABEL_BYTES = 1 << 20
_CREATE_AGAIN = "Create the dataset again, or use another."


def read_texts(folder: Path) -> list[str]:
    """Read all labels of a dataset, in order.

    Raises:
        DataError: The folder has another layout, or a label is missing or not UTF-8.
    """
    with _reading(folder), _environment(folder).begin() as transaction:
        count = transaction.get(b"num-samples")
        if count is None or not count.isdigit() or len(count) > _MAX_ENTRY_DIGITS:
            raise DataError(
                f"{folder} is not an LMDB dataset of text lines",
                allowed="an entry num-samples with the number of lines",
                fix="Set data.train and data.eval to other folders.",
            )
        texts = []
        for number in range(1, int(count) + 1):
            label = transaction.get(b"label-%09d" % number)
            if label is None:
                raise DataError(
                    f"{folder} has no label-{number:09d}",
                    given=f"num-samples {int(count):,}",
                    fix=_CREATE_AGAIN,
                )
            if len(label) > _MAX_LABEL_BYTES:
                raise DataError(
                    f"label-{number:09d} of {folder} has {len(label):,} bytes",
                    allowed=f"at most {_MAX_LABEL_BYTES:,}",
                    fix=_CREATE_AGAIN,
                )
            try:
                texts.append(label.decode())
            except UnicodeError as error:
                raise DataError(
                    f"label-{number:09d} of {folder} is not UTF-8",
                    given=label[:60],
                    fix="Create the dataset again, with labels in UTF-8.",
                ) from error
    if not texts:
        raise DataError(f"{folder} has no lines", given="num-samples 0", fix=_CREATE_AGAIN)
    return texts


def read_image(folder: Path, number: int) -> bytes:
    """Read the image file of a line, by its number from 1. Raises DataError if there is none, or it is too large."""
    # buffers=True returns a view, so that the size is checked before the copy.
    with _reading(folder), _environment(folder).begin(buffers=True) as transaction:
        content = transaction.get(b"image-%09d" % number)
        if content is None:
            raise DataError(f"{folder} has no image-{number:09d}", fix=_CREATE_AGAIN)
        if len(content) > MAX_FILE_BYTES:
            raise too_large(f"image-{number:09d} of {folder}", len(content))
        return bytes(content)


def missing_images(folder: Path, numbers: Sequence[int]) -> set[int]:
    """Return those of the numbers, from 1, that have no image. Raises DataError if the dataset can't be read."""
    with _reading(folder), _environment(folder).begin(buffers=True) as transaction:
        return {number for number in numbers if transaction.get(b"image-%09d" % number) is None}


_open: dict[Path, Any] = {}


def _close_all() -> None:
    for environment in _open.values():
        environment.close()
    _open.clear()


# An open LMDB environment does not survive a fork: a forked DataLoader worker could neither use it nor open it again.
os.register_at_fork(before=_close_all)


def _environment(folder: Path) -> Any:
    """Return the LMDB environment of a folder, opened on first use."""
    if folder not in _open:
        _open[folder] = _opened(folder)
    return _open[folder]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Convert the errors of the library to errors for the user."""
    require("lmdb", f"{folder} is a folder, and reading LMDB")
    import lmdb

    try:
        yield
    except (lmdb.Error, OSError, ValueError) as error:
        raise DataError(
            f"{folder} can't be read as an LMDB dataset: {error}",
            cause="the file is damaged or incomplete",
            fix="Copy or download it again.",
        ) from error


def _opened(folder: Path) -> Any:
    import lmdb

    if not (folder / "data.mdb").is_file():
        raise DataError(
            f"{folder} is a folder without data.mdb",
            allowed="an LMDB dataset, or a file with labels",
            fix="Set data.train and data.eval to LMDB folders or label files.",
        )
    # No lock, which would be a file beside the data; no reading ahead, as images are read in random order.
    environment = lmdb.open(
        str(folder), readonly=True, lock=False, readahead=False, meminit=False, max_readers=1
    )
    # The library maps the file into memory: reading beyond the end of a truncated file would end the process.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    found = (folder / "data.mdb").stat().st_size
    if found < needed:
        environment.close()
        raise ValueError(f"data.mdb has {found:,} bytes, {needed:,} needed")
    return environment


_MAX_LINE_BYTES = 1 << 20  # the numbers of a line take thirty times its size as Python objects
MAX_LINES = 10_000_000
MAX_LABEL_BYTES = 1 << 30  # ten times the size of three million lines
_FORM_LINES = 20  # at the beginning of a file, by which its form is detected
FORMS = {"tsv": "path<TAB>text", "words": "path text", "index": "path number number ..."}

Lines = Iterable[tuple[int, str]]  # line numbers, from 1, and lines


@dataclass(frozen=True, eq=False)
class Labels:
    """Names of N images, and their texts."""

    path: Path  #: The label file or LMDB folder.
    names: bytes  #: File names of the images, a line break behind each; empty names for LMDB.
    name_starts: (
        IntArray  #: (N + 1,) start of each name in `names`; the last value is their length.
    )
    codes: CodeArray  #: Code points of all texts, joined.
    text_starts: (
        IntArray  #: (N + 1,) start of each text in `codes`; the last value is their length.
    )
    lines: IntArray  #: (N,) line numbers in the file, from 1; for LMDB the numbers of the images.
    is_index: bool  #: Whether the file has numbers of characters instead of texts.
    #: Numbers in index labels without a character, which make a text shorter than its label.
    num_gaps: int
    padded: Sequence[int]  #: Rows of texts that begin or end with a space.

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, row: int) -> str:
        """Return the file name of an image."""
        start, end = self.name_starts[row : row + 2].tolist()
        return self.names[start : end - 1].decode()

    def text(self, row: int) -> str:
        """Return the text of an image."""
        return text_of(self.codes[slice(*self.text_starts[row : row + 2])])

    def where(self, row: int) -> str:
        """Return FILE:LINE, or FOLDER:NUMBER for LMDB."""
        return f"{short_path(self.path)}:{self.lines[row]}"


def read_labels(path: Path, config: DataConfig, chars: Path | None = None) -> Labels:
    """Read a label file or an LMDB folder. The result is cached for the next caller.

    Raises:
        DataError: It can't be read, or a line has another format.
    """
    try:
        stamp = path.stat()
    except OSError as error:
        beside = sorted(file.name for file in path.parent.glob("*"))
        raise DataError(
            f"{path} can't be read: {error.strerror or error}",
            given=f"the folder contains {some(beside, 8)}" if beside else None,
            allowed="a file with labels, or an LMDB folder",
            fix="Set data.train and data.eval to the files with labels.",
        ) from error
    # With size and time, so that a changed file is read again.
    return _read(path, (stamp.st_mtime_ns, stamp.st_size), config.form, chars, config.normalize)


def padded_row(labels: Labels) -> str:
    """Describe texts that begin or end with a space, for the head of a run; empty if there are none."""
    if not labels.padded:
        return ""
    count = f"{len(labels.padded):,} of {len(labels):,}"
    return f"{count} begin or end with a space, such as {labels.where(labels.padded[0])}"


# The files of training and validation.
@functools.lru_cache(maxsize=2)
def _read(
    path: Path, stamp: tuple[int, int], form: str, chars: Path | None, normalize: str
) -> Labels:
    lines: Lines
    characters: dict[str, str] = {}
    if path.is_dir():
        form = "lmdb"
        lines = enumerate(read_texts(path), start=1)
    else:
        fix = "Set data.train and data.eval to readable files."
        content = to_utf8(path, read_list(path, MAX_LABEL_BYTES, fix, "a file with labels"))
        form = _form_of(path, form, list(islice(_lines(path, content), _FORM_LINES)), chars)
        lines = _lines(path, content)
        if form == "index" and chars is not None:
            characters = {str(number): each for number, each in enumerate(read_chars(chars))}
    names = bytearray()
    codes = bytearray()
    name_starts = array("q", [0])
    text_starts = array("q", [0])
    numbers = array("q")
    padded: list[int] = []
    num_gaps = 0
    for number, line in lines:
        name = ""
        text = line
        if form == "index":
            name, signs = _signs(f"{short_path(path)}:{number}", line, characters)
            text = "".join(signs)
            num_gaps += signs.count("")
        elif form != "lmdb":
            name, text = _pair(f"{short_path(path)}:{number}", line, form)
        if form != "index":
            text = normalize_text(text, normalize)
        if text.strip() != text:
            padded.append(len(numbers))
        names += name.encode() + b"\n"
        name_starts.append(len(names))
        codes += text.encode("utf-32-le")
        text_starts.append(len(codes) // 4)
        numbers.append(number)
    return Labels(
        path,
        bytes(names),
        np.array(name_starts),
        np.frombuffer(codes, np.uint32),
        np.array(text_starts),
        np.array(numbers),
        is_index=form == "index",
        num_gaps=num_gaps,
        padded=padded,
    )


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, one by one: all as strings would take ten times the size of the file.

    Raises:
        DataError: There are too many lines, or one is too long.
    """
    if content.count(b"\n") > MAX_LINES:
        raise DataError(
            f"{path} has {content.count(10):,} lines",
            allowed=f"at most {MAX_LINES:,}",
            fix="Split the file.",
        )
    for number, line in enumerate(io.BytesIO(content), start=1):
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(
                f"{short_path(path)}:{number} is longer than {_MAX_LINE_BYTES:,} bytes",
                allowed=f"lines of {' or '.join(FORMS.values())}",
                fix="Check that this is a label file.",
            )
        text = line.decode().removesuffix("\n")
        if text.strip():
            yield number, text


def _form_of(path: Path, form: str, lines: list[tuple[int, str]], chars: Path | None) -> str:
    if not lines:
        raise DataError(
            f"{path} has no labels",
            allowed=f"lines of {' or '.join(FORMS.values())}",
            fix="Add a line for each image.",
        )
    if form == "auto":
        first = [line for _, line in lines]
        if path.suffix.lower() == ".tsv" or 2 * sum("\t" in line for line in first) > len(first):
            return "tsv"
        looks_like_numbers = all(
            len(fields) > 2 and all(map(str.isdecimal, fields[1:]))
            for fields in map(str.split, first)
        )
        if not looks_like_numbers:
            return "words"
        form = "index"
    if form == "index" and chars is None:
        number, line = lines[0]
        raise DataError(
            f"{short_path(path)} has index labels, but data.chars is not set",
            given=line[:60],
            where=f"{short_path(path)}:{number}",
            fix="Set data.chars=char_std_5990.txt, or data.form=words if the labels are texts.",
        )
    return form


def _pair(where: str, line: str, form: str) -> tuple[str, str]:
    """Split a line into name and text. Columns after a second tab are ignored."""
    pair = line.split("\t", 2) if form == "tsv" else line.split(None, 1)
    if len(pair) < 2 or not pair[0]:
        has_tab = form == "words" or "\t" in line
        raise DataError(
            f"{where} {f'is not of the form {FORMS[form]}' if has_tab else 'has no tab'}",
            given=line.strip()[:60],
            allowed=FORMS[form],
            fix="Write the path, a tab and the text, or set data.form.",
        )
    return pair[0], pair[1] if form == "tsv" else pair[1].strip()


def _signs(where: str, line: str, characters: Mapping[str, str]) -> tuple[str, list[str]]:
    """Split a line of index labels into name and characters; empty ones for numbers without a character."""
    name, *fields = line.split()
    try:
        return name, [characters[field] for field in fields]
    except KeyError as error:
        raise DataError(
            f"{where} has {error.args[0][:40]}, which is not the number of a character",
            allowed=f"0 to {len(characters) - 1:,}",
            fix="Set data.form=words if the labels are texts, or correct data.chars.",
        ) from None
