"""Read a small file of unknown origin: a regular file only, and no more than a limit."""

import errno
import json
import math
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 64 * 1024 * 1024
MAX_MEMORY_BYTES = 512 * 1024 * 1024
MAX_TEXT = 300  # characters of a name or value that is shown
# Memory of Python's objects, in bytes: of a value in a list, and in addition of a list and of an object.
_BYTES_OF = ((b",", 64), (b"[", 64), (b"{", 256))


def open_plain(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file; `flags` are further ones of `os.open`.

    A FIFO, a device or a folder is refused before the first read, which might block or never end.

    Raises:
        OSError: The file is missing, is not a regular file, or cannot be read. `strerror` holds the reason.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer. It changes nothing for a regular file.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags), "rb")  # noqa: SIM115 - by the caller
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def no_link(path: str, flags: int) -> int:
    """Open a file as the `opener` of `open`, and neither through a symbolic link nor a FIFO without a reader.

    A file of a stranger's run folder must not lead to another file of this user.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_stored(path: Path, flags: int = 0) -> BufferedReader:
    """Open a regular file to copy it whole, as `open_plain` does: one with holes, which a copy would fill, is refused.

    Raises:
        OSError: See `open_plain`; or less than a quarter of a large file is on the disk, if it is not compressed.
    """
    file = open_plain(path, flags)
    status = os.fstat(file.fileno())
    stored = status.st_blocks * 512
    if status.st_size > MAX_BYTES and 4 * stored < status.st_size:
        file.close()
        raise OSError(
            errno.EFBIG,
            f"it has {status.st_size:,} bytes, and {stored:,} of them are stored",
            str(path),
        )
    return file


def read_plain(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file, as `open_plain` opens it.

    Raises:
        OSError: The file cannot be opened or read, or is larger than `max_bytes`. `strerror` holds the reason.
    """
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(
                errno.EFBIG, f"it has {size:,} bytes, and at most {max_bytes:,} are read", str(path)
            )
        # With a limit again, as the file may have grown; of its size, as Python reserves memory for the limit.
        return file.read(size)


def read_part(path: Path, num_bytes: int, *, is_end: bool) -> bytes:
    """Return the beginning or the end of a regular file; nothing if it cannot be read.

    Args:
        path, num_bytes, is_end: The file, the bytes to read at most, and whether those at its end.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            # `read` takes memory for all bytes that it is asked for.
            num_bytes = min(num_bytes, size)
            file.seek(size - num_bytes if is_end else 0)
            return file.read(num_bytes)
    except OSError:
        return b""


def json_text(value: object, **options: Any) -> bytes:
    """Return a JSON value as text in UTF-8, in which a lone surrogate is an escape; options of `json.dumps`.

    A file name that is not UTF-8 has lone surrogates in Python, and so may a text of a stranger's JSON file.
    """
    # Python's escape of a surrogate is JSON's.
    return json.dumps(value, ensure_ascii=False, **options).encode("utf-8", "backslashreplace")


def finite_numbers(values: object) -> dict[str, int | float]:
    """Return the numbers in a JSON object that a float can have; JSON allows integers of any length."""
    found = values.items() if isinstance(values, dict) else ()
    return {
        name: v for name, v in found if isinstance(v, int | float) and abs(v) <= sys.float_info.max
    }


def parse_json(content: bytes, max_memory_bytes: int | None = None) -> Any:
    """Parse a JSON value that takes at most so much memory, as estimated, in bytes; None: no limit.

    Raises:
        ValueError: The content is not JSON, is nested too deeply to be read, or would take too much memory.
    """
    if max_memory_bytes is not None:
        # Three bytes of text can take 64 in memory, as in `[],[],`. Estimated before any object is created.
        num_bytes = sum(size * content.count(sign) for sign, size in _BYTES_OF)
        if num_bytes > max_memory_bytes:
            raise ValueError(
                f"it would take some {num_bytes:,} bytes of memory; at most {max_memory_bytes:,} are used"
            )
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def number(value: object) -> float | None:
    """Return a JSON number as a float; None if it is none, not finite, or beyond the range of a float."""
    # True is an int for isinstance.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        converted = float(value)
    # JSON allows integers of any length.
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def as_dict(value: object) -> dict[str, Any]:
    """Return a JSON object; an empty one in place of any other value."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a JSON array; an empty one in place of any other value."""
    return value if isinstance(value, list) else []


def shorten(value: object, num_chars: int = MAX_TEXT) -> str:
    """Return a value as text of limited length."""
    full = str(value)
    return full if len(full) <= num_chars else f"{full[: num_chars - 1]}…"


def short_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside, else absolute."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)
