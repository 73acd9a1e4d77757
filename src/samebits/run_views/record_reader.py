"""Read `metrics.jsonl` while a run appends to it: each call returns the records that are new and whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from samebits.config.plain_file import parse_json
from samebits.report.records import FILE_NAME
from samebits.run_views.files import count, number

_MAX_BYTES = 256 * 1024 * 1024  # of a file
_MAX_RECORDS = 500_000  # of a file: about 500 MB of memory and 10 s
_CHUNK_BYTES = 4 * 1024 * 1024
_MAX_LINE_BYTES = 256 * 1024
_MAX_LINE_MEMORY_BYTES = 4 * 1024 * 1024


class RecordReader:
    """Follows the records of a run folder.

    A line counts once it ends with a line feed, so a half-written one is read at a later call. A resume replaces the
    file by a shorter one; then all records are read again.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FILE_NAME
        self._position = 0
        self._inode = -1
        self._num_lines = 0
        self.num_skipped = 0  #: Number of lines that are no records.
        self.is_cut = False  #: Whether the file is larger than what is read.

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new records, and whether they replace all earlier ones."""
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return [], False
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return [], False
            is_new = status.st_ino != self._inode or status.st_size < self._position
            if is_new:
                self._position, self._inode, self._num_lines = 0, status.st_ino, 0
            return self._read(descriptor), is_new
        except OSError:
            return [], False
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        while self._position < _MAX_BYTES and self._num_lines < _MAX_RECORDS:
            chunk = os.pread(descriptor, _CHUNK_BYTES, self._position)
            end = chunk.rfind(b"\n") + 1
            if not end:
                # No line is as long as a chunk: this is no file of records.
                self.is_cut = self.is_cut or len(chunk) == _CHUNK_BYTES
                return records
            self._position += end
            lines = chunk[:end].splitlines()
            self._num_lines += len(lines)
            for line in lines:
                record = _parse(line)
                if record is None:
                    self.num_skipped += 1
                else:
                    records.append(record)
            if len(chunk) < _CHUNK_BYTES:
                return records
        self.is_cut = True
        return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a record with kind, step and epoch; None for anything else."""
    if len(line) > _MAX_LINE_BYTES:
        return None
    try:
        record = parse_json(line, _MAX_LINE_MEMORY_BYTES)
    except ValueError:
        return None
    if not (isinstance(record, dict) and isinstance(record.get("kind"), str)):
        return None
    epoch = number(record.get("epoch"))
    return None if epoch is None or epoch < 0 else {**record, "step": count(record.get("step")), "epoch": epoch}
