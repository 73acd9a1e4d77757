"""Read of the files of a run folder, which may be a stranger's: regular files only, limited sizes, JSON only."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.plain_file import number, open_plain, parse_json, read_plain, shorten

_MAX_JSON_BYTES = 4 * 1024 * 1024
_MAX_JSON_MEMORY_BYTES = 64 * 1024 * 1024
_MAX_STEP = 1 << 53


def read_object(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing, too large, damaged, or holds something else."""
    try:
        content = parse_json(read_plain(path, max_bytes), _MAX_JSON_MEMORY_BYTES)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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


def count(value: object) -> int:
    """Return a JSON number as a count of steps or processes; 0 if it is none."""
    found = number(value)
    return int(found) if found is not None and 0 <= found <= _MAX_STEP else 0


def text(value: object) -> str:
    """Return a JSON string, shortened; empty if it is none."""
    return shorten(value) if isinstance(value, str) else ""


def plain_text(value: Any) -> str:
    """Return a setting as it is written on the command line."""
    if value is None:
        return "null"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def numbers(values: object, most: int = 200) -> dict[str, float]:
    """Return the finite numbers of a JSON object by name, at most so many."""
    if not isinstance(values, Mapping):
        return {}
    found = {}
    for name, value in values.items():
        converted = number(value)
        if converted is not None:
            found[shorten(name, 80)] = converted
        if len(found) == most:
            break
    return found
