"""The lines of a label file of unknown origin, some at a time, in whichever encoding it has."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from lockstep.config.load import short_path
from lockstep.config.plain_file import read_plain
from lockstep.errors import DataError

_CHUNK_LINES, _CHUNK_BYTES = 100_000, 1 << 24
_MAX_LINE_BYTES = 1 << 20  # numbers of a line, as objects, take thirty times its size
MAX_LINES = 10_000_000
MAX_LABEL_BYTES = 1 << 30  # ten times as much as three million lines
FORMS = {
    "tsv": "path<TAB>text",
    "words": "path text",
    "index": "path number number ...",
}

Rows = list[tuple[int, str]]  # numbers of lines, from 1, and the lines


def read_chunks(path: Path, encoding: str) -> Iterator[Rows]:
    """The lines of a file that are not empty, some at a time: as strings they take ten times the room.

    Raises:
        DataError: It cannot be read or decoded, or has gigantic lines or too many.
    """
    content = _content(path)
    if content.count(b"\n") > MAX_LINES:
        raise DataError(f"{path} has {content.count(10):,} lines", allowed=f"up to {MAX_LINES:,}", fix="split it")
    name = _encoding_of(path, content, encoding)
    lines = io.BytesIO(content)
    number = 0
    while chunk := _next_lines(path, lines, number):
        # No character's bytes have a line break among them, in none of these encodings.
        texts = b"".join(chunk).decode(name).removeprefix("\ufeff").split("\n")
        rows = [(place, line) for place, line in enumerate(texts, start=number + 1) if line.strip()]
        number += len(chunk)
        if rows:
            yield rows


def _next_lines(path: Path, lines: io.BytesIO, number: int) -> list[bytes]:
    """Some lines after the first so many."""
    chunk: list[bytes] = []
    num_bytes = 0
    while len(chunk) < _CHUNK_LINES and num_bytes < _CHUNK_BYTES and (line := lines.readline(_MAX_LINE_BYTES + 1)):
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(
                f"{short_path(path)}:{number + len(chunk) + 1} is longer than {_MAX_LINE_BYTES:,} bytes",
                allowed=f"lines of {' or '.join(FORMS.values())}",
            )
        chunk.append(line)
        num_bytes += len(line)
    return chunk


def _content(path: Path) -> bytes:
    try:
        return read_plain(path, MAX_LABEL_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", allowed="a file with labels") from error


def _encoding_of(path: Path, content: bytes, encoding: str) -> str:
    names = {"auto": ("utf-8", "gb18030"), "utf-8": ("utf-8",), "gbk": ("gb18030",)}[encoding]
    for name in names:
        try:
            # In parts: as one text it takes up to four times as much.
            decoder = codecs.getincrementaldecoder(name)()
            for place in range(0, len(content), _CHUNK_BYTES):
                decoder.decode(content[place : place + _CHUNK_BYTES])
            decoder.decode(b"", final=True)
            return name
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, place + error.start) + 1
    raise DataError(
        f"{path}:{line} cannot be decoded",
        given=f"data.encoding={encoding}",
        allowed="UTF-8 or GBK",
        fix="save it as UTF-8",
    )
