"""Read label files of any format, which may be a stranger's, and LMDB labels.

Millions of lines are stored as a few arrays, which DataLoader workers share, instead of millions of strings.
"""

import functools
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from samebits.data.images import MAX_FILE_BYTES, too_large
from samebits.data.keyed import IntArray
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.extras import pip_line
from samebits.plain_file import short_path
from samebits.recipes.listing import read_list
from samebits.recipes.text.alphabet import CodeArray, codes_of, normalize_text, read_chars, text_of
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
    try:
        import lmdb
    except ImportError:
        raise DataError(
            f"{folder} is a folder, and reading LMDB requires the package lmdb",
            fix=f"Run {pip_line('lmdb')}.",
        ) from None
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


_MAX_DIGITS = 18  # such a number fits into 64 bits
_CHUNK_LINES = 100_000
_CHUNK_BYTES = 1 << 24
_MAX_LINE_BYTES = 1 << 20  # the numbers of a line take thirty times its size as Python objects
MAX_LINES = 10_000_000
MAX_LABEL_BYTES = 1 << 30  # ten times the size of three million lines
FORMS = {"tsv": "path<TAB>text", "words": "path text", "index": "path number number ..."}

Rows = list[tuple[int, str]]  # line numbers, from 1, and lines


@dataclass(frozen=True, eq=False)
class Labels:
    """Names of N images, and their texts."""

    path: Path  #: The label file or LMDB folder.
    names: bytes  #: File names of the images, joined by line breaks; empty for LMDB.
    name_ends: IntArray  #: (N,) end of each name in `names`.
    codes: CodeArray  #: Code points of all texts, joined.
    text_ends: IntArray  #: (N,) end of each text in `codes`.
    lines: IntArray  #: (N,) line numbers in the file, from 1; for LMDB the numbers of the images.
    is_index: bool = False  #: Whether the file has numbers of characters instead of texts.
    num_gaps: int = (
        0  #: Numbers in index labels without a character, which make a text shorter than its label.
    )

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, row: int) -> str:
        """Return the file name of an image."""
        start = int(self.name_ends[row - 1]) + 1 if row else 0
        return self.names[start : int(self.name_ends[row])].decode()

    def text(self, row: int) -> str:
        """Return the text of an image."""
        return text_of(self.codes[self.text_start(row) : int(self.text_ends[row])])

    def text_start(self, row: int) -> int:
        """Return the start of a text in `codes`."""
        return int(self.text_ends[row - 1]) if row else 0

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
        beside = sorted(file.name for file in path.parent.glob("*")) if path.parent.is_dir() else []
        raise DataError(
            f"{path} can't be read: {error.strerror or error}",
            given=f"the folder contains {', '.join(beside[:8])}{' ...' if len(beside) > 8 else ''}"
            if beside
            else None,
            allowed="a file with labels, or an LMDB folder",
            fix="Set data.train and data.eval to the files with labels.",
        ) from error
    # With size and time, so that a changed file is read again.
    return _read(
        path,
        (stamp.st_mtime_ns, stamp.st_size),
        config.form,
        chars,
        config.normalize,
    )


def padded_row(labels: Labels) -> str:
    """Describe texts that begin or end with a space, for the head of a run; empty if there are none."""
    filled = np.flatnonzero(np.diff(labels.text_ends, prepend=0))
    ends = labels.text_ends[filled]
    starts = np.concatenate([[0], labels.text_ends])[filled]
    spaces = [ord(sign) for sign in text_of(np.unique(labels.codes)) if sign.isspace()]
    rows = filled[np.isin(labels.codes[starts], spaces) | np.isin(labels.codes[ends - 1], spaces)]
    if not len(rows):
        return ""
    return f"{len(rows):,} of {len(labels):,} begin or end with a space, such as {labels.where(int(rows[0]))}"


# The files of training and validation.
@functools.lru_cache(maxsize=2)
def _read(
    path: Path, stamp: tuple[int, int], form: str, chars: Path | None, normalize: str
) -> Labels:
    found = _Columns()
    if path.is_dir():
        texts = read_texts(path)
        found.add_texts([], texts, range(1, len(texts) + 1), normalize)
        return found.labels(path)
    table: list[str] = []
    is_first = True
    for rows in read_chunks(path):
        if is_first:
            form = _form_of(path, form, rows, chars)
            is_first = False
            table = read_chars(chars) if form == "index" and chars is not None else []
        if form == "index":
            found.add_numbers(path, rows, table)
        else:
            found.add_texts(
                *_split(path, rows, "\t" if form == "tsv" else None),
                [number for number, _ in rows],
                normalize,
            )
    if is_first:
        raise DataError(
            f"{path} has no labels",
            allowed=f"lines of {' or '.join(FORMS.values())}",
            fix="Add a line for each image.",
        )
    return found.labels(path, is_index=form == "index")


class _Columns:
    """The chunks of a label file: names, their lengths, code points, lengths of texts and line numbers of each."""

    def __init__(self) -> None:
        self._chunks: list[tuple[bytes, IntArray, CodeArray, IntArray, IntArray]] = []
        self._num_gaps = 0

    def add_texts(
        self, names: Sequence[str], texts: list[str], lines: Iterable[int], normalize: str
    ) -> None:
        if normalize != "none":
            # One by one: normalizing the joined texts could combine the end of one with the start of the next.
            texts = [normalize_text(text, normalize) for text in texts]
        self._add(names, codes_of("".join(texts)), _lengths(texts), lines)

    def add_numbers(self, path: Path, rows: Rows, table: list[str]) -> None:
        halves = [line.split(None, 1) for _, line in rows]
        labels = [half[1] if len(half) > 1 else "" for half in halves]
        counts = np.array([len(label.split()) for label in labels], dtype=np.int64)
        try:
            numbers = np.array(" ".join(labels).split(), dtype=np.int64)
        except (ValueError, OverflowError):
            raise _bad_number(path, rows, len(table)) from None
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= len(table)):
            raise _bad_number(path, rows, len(table))
        codes = np.array(
            [ord(character) if character else 0 for character in table], dtype=np.uint32
        )[numbers]
        is_character = codes != 0
        # Number of characters before the end of each label.
        ends = np.concatenate([[0], np.cumsum(is_character)])[np.cumsum(counts)]
        lengths = np.diff(ends, prepend=0).astype(np.int64)
        self._add(
            [half[0] for half in halves],
            codes[is_character],
            lengths,
            [number for number, _ in rows],
        )
        self._num_gaps += int((~is_character).sum())

    def _add(
        self, names: Sequence[str], codes: CodeArray, text_lengths: IntArray, lines: Iterable[int]
    ) -> None:
        packed = [name.encode() for name in names]
        numbers = np.fromiter(lines, dtype=np.int64)
        self._chunks.append((b"\n".join(packed), _lengths(packed), codes, text_lengths, numbers))

    def labels(self, path: Path, *, is_index: bool = False) -> Labels:
        names, name_lengths, codes, text_lengths, lines = zip(*self._chunks, strict=True)
        return Labels(
            path=path,
            names=b"\n".join(names),
            name_ends=np.cumsum(np.concatenate(name_lengths) + 1) - 1,
            codes=np.concatenate(codes),
            text_ends=np.cumsum(np.concatenate(text_lengths)),
            lines=np.concatenate(lines),
            is_index=is_index,
            num_gaps=self._num_gaps,
        )


def _form_of(path: Path, form: str, rows: Rows, chars: Path | None) -> str:
    if form == "auto":
        first = [line for _, line in rows[:20]]
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
        raise DataError(
            f"{short_path(path)} has index labels, but data.chars is not set",
            given=rows[0][1][:60],
            where=f"{short_path(path)}:{rows[0][0]}",
            fix="Set data.chars=char_std_5990.txt, or data.form=words if the labels are texts.",
        )
    return form


def _split(path: Path, rows: Rows, separator: str | None) -> tuple[list[str], list[str]]:
    """Split rows into names and texts. Columns after a second tab are ignored."""
    pairs = [line.strip("\r\n").split(separator, 2 if separator else 1) for _, line in rows]
    short = next((row for row, pair in enumerate(pairs) if len(pair) < 2 or not pair[0]), None)
    if short is not None:
        number, line = rows[short]
        form = FORMS["tsv" if separator else "words"]
        has_tab = separator is None or separator in line
        problem = f"is not of the form {form}" if has_tab else "has no tab"
        raise DataError(
            f"{short_path(path)}:{number} {problem}",
            given=line.strip()[:60],
            allowed=form,
            fix="Write the path, a tab and the text, or set data.form.",
        )
    texts = [pair[1] if separator else pair[1].strip() for pair in pairs]
    return [pair[0] for pair in pairs], texts


def _lengths(values: Sequence[str] | Sequence[bytes]) -> IntArray:
    return np.fromiter(map(len, values), dtype=np.int64, count=len(values))


def _bad_number(path: Path, rows: Rows, num_chars: int) -> DataError:
    for number, line in rows:
        for field in line.split()[1:]:
            if not field.isdecimal() or len(field) > _MAX_DIGITS or int(field) >= num_chars:
                return DataError(
                    f"{short_path(path)}:{number} has {field[:40]}, which is not the number of a character",
                    allowed=f"0 to {num_chars - 1:,}",
                    fix="Set data.form=words if the labels are texts, or correct data.chars.",
                )
    raise AssertionError("every number is that of a character")


def read_chunks(path: Path) -> Iterator[Rows]:
    """Yield the non-empty lines of a file in chunks, since all lines as strings would take ten times the file's size.

    Raises:
        DataError: The file cannot be read or decoded, or has too many lines or a too long line.
    """
    fix = "Set data.train and data.eval to readable files."
    content = to_utf8(path, read_list(path, MAX_LABEL_BYTES, fix, "a file with labels"))
    if content.count(b"\n") > MAX_LINES:
        raise DataError(
            f"{path} has {content.count(10):,} lines",
            allowed=f"at most {MAX_LINES:,}",
            fix="Split the file.",
        )
    lines = io.BytesIO(content)
    number = 0
    while chunk := _next_lines(path, lines, number):
        texts = b"".join(chunk).decode().split("\n")
        rows = [
            (line_number, line)
            for line_number, line in enumerate(texts, start=number + 1)
            if line.strip()
        ]
        number += len(chunk)
        if rows:
            yield rows


def _next_lines(path: Path, lines: io.BytesIO, number: int) -> list[bytes]:
    """Read the next chunk of lines, after `number` lines that were already read."""
    chunk: list[bytes] = []
    num_bytes = 0
    while (
        len(chunk) < _CHUNK_LINES
        and num_bytes < _CHUNK_BYTES
        and (line := lines.readline(_MAX_LINE_BYTES + 1))
    ):
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(
                f"{short_path(path)}:{number + len(chunk) + 1} is longer than {_MAX_LINE_BYTES:,} bytes",
                allowed=f"lines of {' or '.join(FORMS.values())}",
                fix="Check that this is a label file.",
            )
        chunk.append(line)
        num_bytes += len(line)
    return chunk
