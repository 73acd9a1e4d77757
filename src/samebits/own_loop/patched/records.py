"""The position of a run inside of the files that its script saves, which know the epoch at best.

`torch.save` writes a zip archive, of which torch reads the entries that it knows. One more, ARCHIVE/samebits.json,
stays with the file when the script renames or copies it.
"""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from samebits.config.plain_file import parse_json

ENTRY = "samebits.json"
_MAX_BYTES = 4096  # of the entry: a few numbers


def write_record(file: Any, position: Mapping[str, int]) -> None:
    """Add a position to a file that torch.save has written; nothing if `file` is no path, or no archive."""
    if isinstance(file, str | os.PathLike) and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file, "a") as archive:
            folder = archive.namelist()[0].split("/")[0]
            archive.writestr(f"{folder}/{ENTRY}", json.dumps(position))


def read_record(file: Any) -> dict[str, int] | None:
    """Return the position in a file that torch.load reads; None if it has none."""
    if not (isinstance(file, str | os.PathLike) and zipfile.is_zipfile(file)):
        return None
    # The file may be a stranger's: its entry may be no position, no JSON, or a bomb.
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next((each for each in archive.infolist() if each.filename.endswith(f"/{ENTRY}")), None)
            if entry is None or entry.file_size > _MAX_BYTES:
                return None
            found: Any = parse_json(archive.read(entry))
    except (ValueError, RuntimeError, zipfile.BadZipFile, zlib.error):  # RuntimeError: it is encrypted
        return None
    is_position = isinstance(found, dict) and all(type(each) is int for each in found.values()) and "step" in found
    return found if is_position else None
