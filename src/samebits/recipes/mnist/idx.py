"""Read IDX files, the format of MNIST: plain, .gz or .xz.

A file starts with two zero bytes, one byte for the type of number (8: unsigned bytes, the only one here), one for the
number of dimensions, and the size of each dimension as 4 bytes, most significant first. Source: the format's
description on MNIST's own page (LeCun, Cortes and Burges).
"""

import gzip
import io
import lzma
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.errors import DataError
from samebits.recipes.listing import read_list

ByteArray = npt.NDArray[np.uint8]
ENDINGS = ("", ".gz", ".xz")
# More than the largest published set of digits (EMNIST's, 188 MB). A megabyte of gzip can unpack to a gigabyte.
MAX_BYTES = 1 << 28
_XZ_MEMORY_BYTES = 1 << 28  # for the dictionary, whose size the file itself defines
_AGAIN = "Delete the file and download it again."


def read_idx(path: Path, num_dims: int) -> ByteArray:
    """Read one IDX file of unsigned bytes.

    Args:
        num_dims: Required number of dimensions: 3 for images, 1 for labels.

    Returns:
        (N, H, W) images or (N,) labels, uint8.

    Raises:
        DataError: The file can't be read or unpacked, is empty or cut off, or is not such an IDX file.
    """
    head_bytes = 4 + 4 * num_dims
    packed = read_list(path, MAX_BYTES, "Check the path and its permissions.")
    # The header first: it states how much may be unpacked.
    content = _unpacked(path, packed, head_bytes)
    expected = f"an IDX file of unsigned bytes with {num_dims} dimension{'s' if num_dims > 1 else ''}"
    if not content:
        raise DataError(f"{path} is empty", allowed=expected, fix=_AGAIN)
    magic = bytes((0, 0, 8, num_dims))
    if content[:4] != magic[: len(content)]:
        given = " ".join(f"{byte:02x}" for byte in content[:4])
        is_swapped = content[:3] == magic[:3] and len(content) > 3
        raise DataError(
            f"{path} is not {expected}",
            given=f"first bytes {given}",
            allowed=magic.hex(" "),
            cause="images and labels are swapped" if is_swapped else None,
            fix="Rename the files." if is_swapped else _AGAIN,
        )
    if len(content) < head_bytes:
        raise DataError(
            f"{path} is truncated: {len(content)} bytes, but the header alone has {head_bytes}",
            allowed=expected,
            fix=_AGAIN,
        )
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    size = head_bytes + math.prod(shape)
    wanted = " x ".join(f"{length:,}" for length in shape)
    if size > MAX_BYTES:
        raise DataError(
            f"{path} declares {size:,} bytes",
            given=f"shape in its header: {wanted}",
            allowed=f"at most {MAX_BYTES:,} bytes",
            fix=_AGAIN,
        )
    # One byte more than the header declares is enough to detect a file that is too long.
    content = _unpacked(path, packed, size + 1)
    if len(content) != size:
        is_short = len(content) < size
        fault = f"is truncated: {len(content):,} bytes" if is_short else f"is too long: over {size:,} bytes"
        raise DataError(
            f"{path} {fault}",
            allowed=f"{size:,} bytes, from the shape {wanted} in its header",
            fix=_AGAIN,
        )
    return np.frombuffer(content, np.uint8, offset=head_bytes).reshape(shape)


def _unpacked(path: Path, packed: bytes, num_bytes: int) -> bytes:
    """Decompress the first bytes of a file."""
    try:
        if path.suffix == ".gz" and packed:
            return gzip.GzipFile(fileobj=io.BytesIO(packed)).read(num_bytes)
        if path.suffix == ".xz" and packed:
            unpacker = lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)
            content = unpacker.decompress(packed, num_bytes)
            if len(content) < num_bytes and not unpacker.eof:
                raise EOFError("its end is missing")
            return content
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(
            f"{path} can't be unpacked: {error}",
            given=f"{len(packed):,} bytes",
            cause="the file is truncated or damaged",
            fix=_AGAIN,
        ) from error
    return packed[:num_bytes]
