"""IDX files, the form in which MNIST is given: plain, .gz or .xz.

A file starts with two zero bytes, one byte for the type of number (8: unsigned bytes, the only one here), one for the
number of dimensions, and the size of each dimension as 4 bytes, most significant first. Source: the format's
description on MNIST's own page (LeCun, Cortes and Burges).
"""

from __future__ import annotations

import gzip
import lzma
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError

ByteArray = npt.NDArray[np.uint8]
ENDINGS = ("", ".gz", ".xz")


def read_idx(path: Path, num_dims: int) -> ByteArray:
    """Read one IDX file of unsigned bytes.

    Args:
        path: The file; an ending .gz or .xz says how it is packed.
        num_dims: Dimensions that it must have: 3 for pictures, 1 for labels.

    Raises:
        DataError: The file can't be read or unpacked, is empty or cut off, or is not such an IDX file.
    """
    content = _unpacked(path)
    expected = f"an IDX file of unsigned bytes with {num_dims} dimension{'s' if num_dims > 1 else ''}"
    again = "delete the file and fetch it again"
    if not content:
        raise DataError(f"{path} is empty", expected=expected, do=again)
    head_bytes = 4 + 4 * num_dims
    magic = bytes((0, 0, 8, num_dims))
    if content[:4] != magic[: len(content)]:
        given = " ".join(f"{byte:02x}" for byte in content[:4])
        likely = "pictures and labels swapped" if content[:3] == magic[:3] and len(content) > 3 else None
        raise DataError(
            f"{path} is not {expected}", given=f"first bytes {given}", expected=magic.hex(" "), likely=likely
        )
    if len(content) < head_bytes:
        raise DataError(
            f"{path} is cut off: {len(content)} bytes, and the head alone has {head_bytes}",
            expected=expected,
            do=again,
        )
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    size = head_bytes + int(np.prod(shape, dtype=np.int64))
    if len(content) != size:
        fault = "is cut off" if len(content) < size else "goes on after its end"
        wanted = " x ".join(f"{length:,}" for length in shape)
        raise DataError(
            f"{path} {fault}: {len(content):,} bytes",
            expected=f"{size:,} bytes: its head promises {wanted}",
            do=again,
        )
    return np.frombuffer(content, np.uint8, offset=head_bytes).reshape(shape)


def _unpacked(path: Path) -> bytes:
    try:
        packed = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror or error}", do="check the path and its rights"
        ) from error
    if not packed:
        return b""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(packed)
        if path.suffix == ".xz":
            return lzma.decompress(packed)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} can't be unpacked: {error}",
            given=f"{len(packed):,} bytes",
            likely="cut off or damaged",
            do="delete the file and fetch it again",
        ) from error
    return packed
