"""The position of a run inside of the files that its script saves, which know the epoch at best.

`torch.save` writes a zip archive, of which torch reads the entries that it knows. One more, ARCHIVE/samebits.json,
stays with the file when the script renames or copies it.
"""

import json
import os
import zipfile
from collections.abc import Mapping
from typing import Any

ENTRY = "samebits.json"


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
    with zipfile.ZipFile(file) as archive:
        name = next((each for each in archive.namelist() if each.endswith(f"/{ENTRY}")), None)
        found: Any = json.loads(archive.read(name)) if name is not None else None
    # The file may be a stranger's.
    is_position = isinstance(found, dict) and all(type(each) is int for each in found.values()) and "step" in found
    return found if is_position else None
