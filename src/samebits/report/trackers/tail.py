"""Read the records of a run folder as they are written, and remembers which of them a tracker has received."""

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from samebits.plain_file import open_plain, parse_json, read_plain
from samebits.report.records import FILE_NAME, lines_of, record_in
from samebits.storage.run_folder import write_atomically

_FIELDS = ("kind", "step", "epoch")
_DEVICE = ("gpu_use", "mfu")  # `device_use.py`, which imports torch


class Tail:
    """Yields the complete lines of a run's `metrics.jsonl` that are new since the last call.

    A resume or a rollback replaces the file. It is then read from its start.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FILE_NAME
        self._inode = 0
        self._offset = 0

    def new_records(self) -> Iterator[Mapping[str, Any]]:
        """Yield records that were not yielded before, except after the file was replaced."""
        try:
            # No link, and no FIFO: the run folder may be a stranger's.
            opened = open_plain(self._path, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (
                errno.ENOENT,
                errno.EINVAL,
            ):  # it is not there yet, or is no regular file
                return
            raise
        with opened as file:
            status = os.fstat(file.fileno())
            # A new inode: a resume wrote a new file. A smaller size: the inode was used again.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode = status.st_ino
                self._offset = 0
            file.seek(self._offset)
            # A line without its end is still being written, and is read whole the next time.
            for line in lines_of(file):
                self._offset += len(line)
                if (record := record_in(line)) is not None:
                    yield record


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a record under "kind/name", and its epoch.

    JSON's null is a value that is not finite, and becomes NaN. Only that of a device is not known, and left out.
    """
    kind = record.get("kind")
    values = {
        f"{kind}/{name}": math.nan if value is None else float(value)
        for name, value in record.items()
        if name not in _FIELDS
        and (isinstance(value, int | float) or (value is None and name not in _DEVICE))
    }
    return values | {"epoch": float(record.get("epoch") or 0.0)}


class ReadPosition:
    """Which records a tracker has received, in a file of the run folder; none if a new tracked run starts."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        self._path = path
        self.id, self._logged = (
            secrets.token_hex(4),
            dict[str, int](),
        )  #: The tracked run, eight hex digits.
        self.is_resumed = False  #: Whether the file existed.
        if is_new:
            return
        try:
            content = parse_json(read_plain(path))
            logged = {str(kind): int(step) for kind, step in content["logged"].items()}
            # It becomes a part of file names and queries.
            self.id = bytes.fromhex(content["id"]).hex()
            self._logged = logged
            self.is_resumed = True
        # Broad, because the file may be a stranger's: nothing in it may prevent the tracker from starting.
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # there is none, or it is damaged: all records are sent to a new tracked run

    def is_due(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is new to the tracker. A resumed run repeats steps with equal values."""
        return int(record["step"]) > self._logged.get(str(record.get("kind")), -1)

    def note(self, record: Mapping[str, Any]) -> None:
        """Note that the tracker received a record."""
        self._logged[str(record.get("kind"))] = record["step"]

    def save(self) -> None:
        """Write the file. Raises CheckpointError if it cannot be written."""
        write_atomically(self._path, json.dumps({"id": self.id, "logged": self._logged}).encode())
