"""IDX files, the form in which MNIST is given: plain, .gz or .xz.

A file starts with two zero bytes, one byte for the type of number (8: unsigned bytes, the only one here), one for the
number of dimensions, and the size of each dimension as 4 bytes, most significant first. Source: the format's
description on MNIST's own page (LeCun, Cortes and Burges).
"""

from __future__ import annotations

import lzma
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.config.plain_file import read_plain
from lockstep.errors import DataError

ByteArray = npt.NDArray[np.uint8]
_GZIP_BITS = 31  # zlib's number for gzip's own head
_MAX_MEMBERS = 100  # gzip files may be several, one after another
ENDINGS = ("", ".gz", ".xz")
# More than the largest published set of digits (EMNIST's, 188 MB). A megabyte of gzip can unpack to a gigabyte.
MAX_BYTES = 1 << 28
_XZ_MEMORY_BYTES = 1 << 28  # for the dictionary, whose size the file decides on


def read_idx(path: Path, num_dims: int) -> ByteArray:
    """Read one IDX file of unsigned bytes.

    Args:
        path: The file; an ending .gz or .xz says how it is packed.
        num_dims: Dimensions that it must have: 3 for images, 1 for labels.

    Raises:
        DataError: The file cannot be read or unpacked, is empty or cut off, or is not such an IDX file.
    """
    head_bytes = 4 + 4 * num_dims
    packed = _packed(path)
    content = _unpacked(path, packed, head_bytes)
    expected = f"an IDX file of unsigned bytes with {num_dims} dimension{'s' if num_dims > 1 else ''}"
    again = "delete the file and fetch it again"
    if not content:
        raise DataError(f"{path} is empty", allowed=expected, fix=again)
    magic = bytes((0, 0, 8, num_dims))
    if content[:4] != magic[: len(content)]:
        given = " ".join(f"{byte:02x}" for byte in content[:4])
        likely = "images and labels swapped" if content[:3] == magic[:3] and len(content) > 3 else None
        raise DataError(f"{path} is not {expected}", given=f"first bytes {given}", allowed=magic.hex(" "), cause=likely)
    if len(content) < head_bytes:
        raise DataError(
            f"{path} is cut off: {len(content)} bytes, and the head alone has {head_bytes}",
            allowed=expected,
            fix=again,
        )
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    size = head_bytes + math.prod(shape)
    wanted = " x ".join(f"{length:,}" for length in shape)
    if size > MAX_BYTES:
        raise DataError(
            f"{path} claims to hold {size:,} bytes",
            given=f"its head promises {wanted}",
            allowed=f"up to {MAX_BYTES:,} bytes",
            fix=again,
        )
    # One byte more than the head promises shows that the file goes on.
    content = _unpacked(path, packed, size + 1)
    if len(content) != size:
        is_short = len(content) < size
        fault = f"is cut off: {len(content):,} bytes" if is_short else f"goes on after its end: over {size:,} bytes"
        raise DataError(
            f"{path} {fault}",
            allowed=f"{size:,} bytes: its head promises {wanted}",
            fix=again,
        )
    return np.frombuffer(content, np.uint8, offset=head_bytes).reshape(shape)


def _packed(path: Path) -> bytes:
    try:
        return read_plain(path, MAX_BYTES)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}", fix="check the path and its rights"
        ) from error


def _unpacked(path: Path, packed: bytes, num_bytes: int) -> bytes:
    """The first bytes of a file, unpacked."""
    if not packed:
        return b""
    try:
        if path.suffix == ".gz":
            return _gunzipped(packed, num_bytes)
        if path.suffix == ".xz":
            unpacker = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
            content = unpacker.decompress(packed, num_bytes)
            if len(content) < num_bytes and not unpacker.eof:
                raise EOFError("its end is missing")
            return content
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} cannot be unpacked: {error}",
            given=f"{len(packed):,} bytes",
            cause="cut off or damaged",
            fix="delete the file and fetch it again",
        ) from error
    return packed[:num_bytes]


def _gunzipped(packed: bytes, num_bytes: int) -> bytes:
    """As gzip.GzipFile, which reads a name in the head, of any length, byte by byte."""
    content = b""
    for _ in range(_MAX_MEMBERS):
        unpacker = zlib.decompressobj(_GZIP_BITS)
        content += unpacker.decompress(packed, num_bytes - len(content))
        if len(content) >= num_bytes:
            break
        if not unpacker.eof:
            raise EOFError("its end is missing")
        packed = unpacker.unused_data.lstrip(b"\0")
        if not packed:
            break
    return content
