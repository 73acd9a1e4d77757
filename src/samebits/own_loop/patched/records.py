"""The position of a run inside of the files that its script saves, which know the epoch at best.

`torch.save` writes a zip archive, of which torch reads the entries that it knows. One more, ARCHIVE/samebits.json,
stays with the file when the script renames or copies it.
"""

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from samebits.plain_file import parse_json

ENTRY = "samebits.json"
_MAX_BYTES = 4096  # of the entry: a few numbers


def save_with_record(save: Callable[[Any], None], file: Any, position: Mapping[str, int]) -> None:
    """Save to a path or an open file as torch.save does, with a position; paths are replaced at once."""
    if not isinstance(file, str | os.PathLike):
        buffer = io.BytesIO()
        save(buffer)
        _write(buffer, position)
        file.write(buffer.getbuffer())
        return
    path = os.path.realpath(file)
    if not os.path.isdir(os.path.dirname(path)) or (
        os.path.exists(path) and not os.path.isfile(path)
    ):
        save(file)  # with torch's own error, or to a device
        return
    # Many scripts let all ranks write the same file at once. The name stays, since torch writes it into the file.
    with tempfile.TemporaryDirectory(prefix=".samebits-", dir=os.path.dirname(path)) as folder:
        part = os.path.join(folder, os.path.basename(path))
        save(part)
        _write(part, position)
        os.replace(part, path)


def _write(file: Any, position: Mapping[str, int]) -> None:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file, "a") as archive:
            folder = archive.namelist()[0].split("/")[0]
            # Without the time, so that equal checkpoints are equal files.
            archive.writestr(zipfile.ZipInfo(f"{folder}/{ENTRY}"), json.dumps(position))


def read_record(file: Any) -> dict[str, int] | None:
    """Return the position in a file that torch.load reads, a path or an open file; None if it has none."""
    if isinstance(file, str | os.PathLike):
        return _read(file)
    if not (hasattr(file, "seekable") and file.seekable()):
        return None
    start = file.tell()
    try:
        return _read(file)
    finally:
        file.seek(start)


def _read(file: Any) -> dict[str, int] | None:
    if not zipfile.is_zipfile(file):
        return None
    # The file may be a stranger's: its entry may be no position, no JSON, or a bomb.
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next(
                (each for each in archive.infolist() if each.filename.endswith(f"/{ENTRY}")), None
            )
            if entry is None or entry.file_size > _MAX_BYTES:
                return None
            found: Any = parse_json(archive.read(entry))
    except (
        ValueError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ):  # RuntimeError: it is encrypted
        return None
    is_position = (
        isinstance(found, dict)
        and all(type(each) is int for each in found.values())
        and "step" in found
    )
    return found if is_position else None
