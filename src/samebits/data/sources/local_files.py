"""Files of a dataset on local disks: found by name, opened without surprises, and read at any offset.

A file is opened once in a process and read by `pread`, which moves no file position. So forked DataLoader workers can
use the files that their parent has opened.
"""

import glob
import math
import operator
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from os import PathLike
from pathlib import Path
from typing import SupportsIndex

from samebits.errors import ConfigError, DataError, cannot_read
from samebits.plain_file import open_plain

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]

MAX_OPEN = 64  # files that are open at the same time in a process
_MAX_FILES = 1_000_000
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:|-$")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


#: Size in bytes and time of the last change in nanoseconds: the content of a file, without reading it.
Stamp = tuple[int, int]


def stamp_of(descriptor: int) -> Stamp:
    """Return the stamp of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def find_files(given: Paths, suffix: str) -> list[str]:
    """Return the files that a user named, in an order that is equal on all machines.

    Args:
        given: A file; a folder: its files with the suffix, by name; a pattern with `*`, `?` or `{000..009}`; or a list
            of these, in its order.
        suffix: Suffix of the files in a folder, such as ".tar".

    Raises:
        ConfigError: A name is a URL or a command.
        DataError: There are no such files, or a file is named twice.
    """
    names = [given] if isinstance(given, str | PathLike) else list(given)
    found = [path for name in names for path in _find(os.fspath(name), suffix)]
    seen: set[str] = set()
    for path in found:
        absolute = os.path.abspath(path)
        if absolute in seen:
            raise DataError(
                f"{path} is listed twice",
                cause="its samples would occur twice in each epoch",
                fix="List it once.",
            )
        seen.add(absolute)
    if not found:
        raise DataError(
            "the list of files is empty",
            fix=f"Name at least one {suffix} file or a folder of them.",
        )
    return found


def _find(name: str, suffix: str) -> list[str]:
    if _REMOTE.match(name):
        raise ConfigError(
            f"{name} is not a local file",
            allowed="a file, a folder, a pattern such as train-{000..146}.tar, or a list of these",
            fix="Copy the files to a local or mounted disk, and name them there. Commands and URLs are never opened.",
        )
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        # os.listdir has no order, and a sample needs the same index on all machines.
        found = sorted(
            os.path.join(path, each)
            for each in os.listdir(path)
            if each.endswith(suffix) and each[0] != "."
        )
    elif os.path.exists(path):
        found = [path]
    else:
        found = [
            file for each in _expand_braces(path) for file in (sorted(glob.glob(each)) or [each])
        ]
    if not found:
        raise DataError(f"{name} has no files *{suffix}", fix="Check the path.")
    if len(found) > _MAX_FILES:
        raise DataError(
            f"{name} names {len(found):,} files",
            allowed=f"up to {_MAX_FILES:,}",
            fix="Write fewer, larger files.",
        )
    return found


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern such as `a-{000..002}.tar` or `{train,val}.tar`, as a shell would."""
    parts = _BRACES.split(pattern)  # text, content of braces, text, ...
    choices = [[part] if number % 2 == 0 else _choices(part) for number, part in enumerate(parts)]
    if (count := math.prod(map(len, choices))) > _MAX_FILES:
        raise ConfigError(
            f"{pattern} names {count:,} files",
            allowed=f"up to {_MAX_FILES:,}",
            fix="Name fewer files.",
        )
    return map("".join, product(*choices))


def _choices(content: str) -> Sequence[str]:
    match = _RANGE.fullmatch(content)
    if match is None:
        return content.split(",")
    first = int(match[1])
    last = int(match[2])
    if last - first >= _MAX_FILES:
        raise ConfigError(
            f"{{{content}}} names {last - first + 1:,} files",
            allowed=f"up to {_MAX_FILES:,}",
            fix="Name fewer files.",
        )
    return [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]


def open_regular(path: str) -> int:
    """Open a regular file for reading, and return its descriptor.

    Raises:
        DataError: It is missing, cannot be read, or is a folder, a FIFO or a device.
    """
    try:
        with open_plain(Path(path)) as file:
            return os.dup(file.fileno())
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise cannot_read(
            DataError,
            path,
            error,
            "Name a regular file that can be read, not a folder or a device.",
        ) from error


def read_part(path: str, stamp: Stamp, offset: int, length: int) -> bytes:
    """Return `length` bytes of a file. The files most recently used stay open.

    Raises:
        DataError: The file has changed since it was indexed, or cannot be read.
    """
    file = _opened(path, stamp)
    try:
        content = os.pread(file.descriptor, length, offset)
        # pread may return fewer bytes: Linux transfers at most 2 GiB per call.
        while len(content) < length and (
            more := os.pread(file.descriptor, length - len(content), offset + len(content))
        ):
            content += more
    except OSError as error:
        fix = "Check the disk, and start again with the same settings."
        raise cannot_read(
            DataError, path, error, fix, where=f"{length:,} bytes at {offset:,}"
        ) from error
    if len(content) < length:
        raise changed(path)
    return content


class _OpenFile:
    """A descriptor, which is closed with its last user."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(
        self, close: Callable[[int], None] = os.close
    ) -> None:  # the module may be gone when Python ends
        close(self.descriptor)


@lru_cache(maxsize=MAX_OPEN)
def _opened(path: str, stamp: Stamp) -> _OpenFile:
    file = _OpenFile(open_regular(path))
    # Each time that it is opened: it may have been replaced since the index was made.
    if stamp_of(file.descriptor) != stamp:
        raise changed(path)
    return file


def located(ends: Sequence[int], index: SupportsIndex) -> tuple[int, int]:
    """Return which part has an item, given where each part ends, and the item's place in it, as a list counts."""
    position = operator.index(index)
    count = ends[-1]
    if not -count <= position < count:
        raise IndexError(f"sample {position} of {count}")
    position %= count
    part = bisect_right(ends, position)
    return part, position - (ends[part - 1] if part else 0)


def changed(path: str) -> DataError:
    """Make the error for a file that changed after it was indexed."""
    return DataError(
        f"{path} has changed since it was indexed",
        cause="another program writes to it",
        fix="Finish writing the file, then start again.",
    )
