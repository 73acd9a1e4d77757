"""Read the lines of an untrusted label file in chunks."""

import io
from collections.abc import Iterator
from pathlib import Path

from samebits.config.load import short_path
from samebits.data.sources.plain_text import to_utf8
from samebits.errors import DataError
from samebits.recipes.listing import read_list

_CHUNK_LINES, _CHUNK_BYTES = 100_000, 1 << 24
_MAX_LINE_BYTES = 1 << 20  # the numbers of a line take thirty times its size as Python objects
MAX_LINES = 10_000_000
MAX_LABEL_BYTES = 1 << 30  # ten times the size of three million lines
FORMS = {
    "tsv": "path<TAB>text",
    "words": "path text",
    "index": "path number number ...",
}

Rows = list[tuple[int, str]]  # line numbers, from 1, and lines


def read_chunks(path: Path, encoding: str) -> Iterator[Rows]:
    """Yield the non-empty lines of a file in chunks, since all lines as strings would take ten times the file's size.

    Raises:
        DataError: The file cannot be read or decoded, or has too many lines or a too long line.
    """
    fix = "Set data.train and data.eval to readable files."
    content = to_utf8(path, read_list(path, MAX_LABEL_BYTES, fix, "a file with labels"), encoding, "data.encoding")
    if content.count(b"\n") > MAX_LINES:
        raise DataError(
            f"{path} has {content.count(10):,} lines", allowed=f"at most {MAX_LINES:,}", fix="Split the file."
        )
    lines = io.BytesIO(content)
    number = 0
    while chunk := _next_lines(path, lines, number):
        texts = b"".join(chunk).decode().split("\n")
        rows = [(line_number, line) for line_number, line in enumerate(texts, start=number + 1) if line.strip()]
        number += len(chunk)
        if rows:
            yield rows


def _next_lines(path: Path, lines: io.BytesIO, number: int) -> list[bytes]:
    """Read the next chunk of lines, after `number` lines that were already read."""
    chunk: list[bytes] = []
    num_bytes = 0
    while len(chunk) < _CHUNK_LINES and num_bytes < _CHUNK_BYTES and (line := lines.readline(_MAX_LINE_BYTES + 1)):
        if len(line) > _MAX_LINE_BYTES:
            raise DataError(
                f"{short_path(path)}:{number + len(chunk) + 1} is longer than {_MAX_LINE_BYTES:,} bytes",
                allowed=f"lines of {' or '.join(FORMS.values())}",
                fix="Check that this is a label file.",
            )
        chunk.append(line)
        num_bytes += len(line)
    return chunk
