"""LMDB sets as the field packs them: `num-samples`, then `image-000000001` and `label-000000001` and so on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.data.picture_file import MAX_FILE_BYTES, too_large
from lockstep.errors import DataError
from lockstep.recipes.text.lmdb_pages import check_pages

_MAX_DIGITS = 9  # as many as the names of entries have
_MAX_LABEL_BYTES = 1 << 20


def read_texts(folder: Path) -> list[str]:
    """All labels of a set, in order.

    Raises:
        DataError: It is no such set, or a label is missing or not UTF-8.
    """
    with _reading(folder), _environment(folder).begin() as transaction:
        count = transaction.get(b"num-samples")
        if count is None or not count.isdigit() or len(count) > _MAX_DIGITS:
            raise DataError(f"{folder} is not a set of text lines", allowed="an entry num-samples with their number")
        texts = []
        for number in range(1, int(count) + 1):
            label = transaction.get(b"label-%09d" % number)
            if label is None:
                raise DataError(f"{folder} has no label-{number:09d}", given=f"num-samples {int(count):,}")
            if len(label) > _MAX_LABEL_BYTES:
                raise DataError(
                    f"label-{number:09d} of {folder} has {len(label):,} bytes", allowed=f"up to {_MAX_LABEL_BYTES:,}"
                )
            try:
                texts.append(label.decode())
            except UnicodeDecodeError as error:
                raise DataError(f"label-{number:09d} of {folder} is not UTF-8") from error
    if not texts:
        raise DataError(f"{folder} has no lines", given="num-samples 0")
    return texts


def read_image(folder: Path, number: int) -> bytes:
    """The image file of a line, by its number from 1.

    Raises:
        DataError: There is none.
    """
    # As a view: its size is looked at before it is copied.
    with _reading(folder), _environment(folder).begin(buffers=True) as transaction:
        content = transaction.get(b"image-%09d" % number)
        if content is None:
            raise DataError(f"{folder} has no image-{number:09d}")
        if len(content) > MAX_FILE_BYTES:
            raise too_large(f"image-{number:09d} of {folder}", len(content))
        return bytes(content)


_open: dict[Path, Any] = {}
# Files whose pages were looked at, with their time and size: loader workers, which are forked, need not do so again.
_checked: set[tuple[Path, int, int]] = set()


def _close_all() -> None:
    for environment in _open.values():
        environment.close()
    _open.clear()


# LMDB does not outlive a fork: loader workers, which are forked, could neither use nor open what is open by then.
os.register_at_fork(before=_close_all)


def _environment(folder: Path) -> Any:
    """A set, opened when it is first asked for."""
    if folder not in _open:
        _open[folder] = _opened(folder)
    return _open[folder]


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """What the library finds wrong, as an error for the user."""
    try:
        import lmdb
    except ImportError:
        raise DataError(
            f"{folder} is a folder, and to read LMDB sets the package lmdb is needed", fix="pip install lmdb"
        ) from None
    try:
        yield
    except (lmdb.Error, OSError, ValueError) as error:
        raise DataError(
            f"{folder} cannot be read as an LMDB set: {error}",
            cause="damaged, or not whole",
            fix="copy or download it again",
        ) from error


def _opened(folder: Path) -> Any:
    import lmdb

    if not (folder / "data.mdb").is_file():
        raise DataError(f"{folder} is a folder without data.mdb", allowed="an LMDB set, or a file with labels")
    _check(folder / "data.mdb")
    return lmdb.open(str(folder), readonly=True, lock=False, readahead=False, meminit=False, max_readers=1)


def _check(path: Path) -> None:
    """See that reading the file cannot end the process: it is mapped into memory, and the library trusts its pages."""
    status = path.stat()
    stamp = (path, status.st_mtime_ns, status.st_size)
    if stamp not in _checked:
        check_pages(path)
        _checked.add(stamp)
