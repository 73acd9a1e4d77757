"""Read LMDB datasets in the common layout: `num-samples`, `image-000000001`, `label-000000001` and so on."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samebits.data.image_file import MAX_FILE_BYTES, too_large
from samebits.errors import DataError
from samebits.extras import pip_line

_MAX_DIGITS = 9  # digits in the names of entries
_MAX_LABEL_BYTES = 1 << 20
_CREATE_AGAIN = "Create the dataset again, or use another."


def read_texts(folder: Path, encoding: str = "utf-8") -> list[str]:
    """Read all labels of a dataset, in order.

    Raises:
        DataError: The folder has another layout, or a label is missing or in another encoding.
    """
    with _reading(folder), _environment(folder).begin() as transaction:
        count = transaction.get(b"num-samples")
        if count is None or not count.isdigit() or len(count) > _MAX_DIGITS:
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
                    f"{folder} has no label-{number:09d}", given=f"num-samples {int(count):,}", fix=_CREATE_AGAIN
                )
            if len(label) > _MAX_LABEL_BYTES:
                raise DataError(
                    f"label-{number:09d} of {folder} has {len(label):,} bytes",
                    allowed=f"at most {_MAX_LABEL_BYTES:,}",
                    fix=_CREATE_AGAIN,
                )
            try:
                texts.append(label.decode(encoding))
            except UnicodeError as error:
                raise DataError(
                    f"label-{number:09d} of {folder} is not {encoding}",
                    given=label[:60],
                    fix="Set data.encoding to the encoding of all labels, such as gb18030 or cp1252.",
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
            f"{folder} is a folder, and reading LMDB requires the package lmdb", fix=f"Run {pip_line('lmdb')}."
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
    environment = lmdb.open(str(folder), readonly=True, lock=False, readahead=False, meminit=False, max_readers=1)
    # The library maps the file into memory: reading beyond the end of a truncated file would end the process.
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    found = (folder / "data.mdb").stat().st_size
    if found < needed:
        environment.close()
        raise ValueError(f"data.mdb has {found:,} bytes, {needed:,} needed")
    return environment
