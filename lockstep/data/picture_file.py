"""Opens picture files of unknown origin: a fixed list of formats, and limits that are checked before decoding.

Pillow knows some forty formats. One starts a program (EPS runs Ghostscript), several fail with any exception on a
damaged file, and all of them are reached by a file's content, whatever its name is. docs/adr/0028 has the reasons.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import warnings
from pathlib import Path

# The import registers a format with Pillow, which otherwise imports all of its formats.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from lockstep.errors import DataError

_PLUGINS = (
    JpegImagePlugin.JpegImageFile, PngImagePlugin.PngImageFile, WebPImagePlugin.WebPImageFile,
    BmpImagePlugin.BmpImageFile, GifImagePlugin.GifImageFile, TiffImagePlugin.TiffImageFile,
    PpmImagePlugin.PpmImageFile,
)  # fmt: skip
FORMATS = tuple(plugin.format for plugin in _PLUGINS if plugin.format)
FORMATS_TEXT = "JPEG, PNG, WebP, BMP, GIF, TIFF or PPM"

# A file of a few bytes can claim any size. Pillow refuses from here on too.
MAX_PIXELS = 178_956_970
# What a picture may take in memory: its file, and what decoding needs at its peak.
MAX_MEMORY_BYTES = 700_000_000
MAX_FILE_BYTES = 256 * 1024 * 1024

# Bytes that decoding and the conversion to RGB take per pixel at their peak, with Pillow's four bytes per pixel.
# Measured by tests/unit/data/test_picture_limits.py. A progressive JPEG file keeps all coefficients until its end.
_BYTES_PER_PIXEL = {"progressive": 12, "WEBP": 17, "TIFF": 12}
_OTHERS_BYTES_PER_PIXEL = 9
# JPEG files decoded without Pillow.
BASELINE_BYTES_PER_PIXEL, PROGRESSIVE_BYTES_PER_PIXEL = 3, 9
# Of pixels over all scans of a progressive JPEG file. Usual files have about 10 scans, and each goes over the whole
# picture, even if it takes a few bytes.
_MAX_SCANNED_PIXELS, _MANY_SCANS = 2_000_000_000, 100

# Pillow goes through the heads of files in Python, a segment or a byte at a time. Usual ones have some ten segments.
MAX_SEGMENTS, _MAX_JUNK_BYTES = 10_000, 1 << 20
_MAX_CHUNKS = 100_000  # of a PNG file: its pixels are in chunks of some 8 KB
_MAX_PLAIN_BYTES = 1 << 23  # of a PPM file whose pixels are digits, which are read one by one
_MARKER = re.compile(rb"[^\xff]*\xff+(.)", re.DOTALL)
_MARKERS_ALONE = frozenset((0x00, *range(0xD0, 0xDA)))  # without a length
_START_OF_SCAN = 0xDA

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF tags


def read_content(path: Path | str) -> bytes:
    """All of a regular file: as `Path.read_bytes`, without the file object, which takes longer than the reading.

    Raises:
        DataError: The file can't be read, is a FIFO or a device, or is too large for a picture.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(number)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if status.st_size > MAX_FILE_BYTES:
                raise too_large(path, status.st_size)
            content = os.read(number, status.st_size + 1)
            # A file may grow while it is read.
            while len(content) <= MAX_FILE_BYTES and (more := os.read(number, 1 << 20)):
                content += more
            return content
        finally:
            os.close(number)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise damaged(path, error) from error


def open_image(content: bytes | bytearray, name: Path | str) -> Image.Image:
    """Open a picture of one of the allowed formats. Its pixels are not decoded yet.

    Args:
        content: The file.
        name: What errors call it.

    Raises:
        DataError: It is no picture of these formats, is damaged, or claims to be enormous.
    """
    if _is_long_winded(content):
        raise DataError(
            f"the picture {name} is in so many parts that reading it would take long",
            cause="made to waste time, or a damaged file",
            fix="save it anew, or take it out",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is our limit
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        is_small = image.width * image.height <= MAX_PIXELS and _tiles_are_small(image)
    except Image.DecompressionBombError:
        raise enormous(name) from None
    except UnidentifiedImageError:
        raise not_a_picture(name, content) from None
    except Exception as error:  # the readers of formats raise whatever comes up
        raise damaged(name, error) from error
    if not is_small:
        raise enormous(name)
    return image


def check_memory(name: Path | str, num_bytes: int, image: Image.Image) -> None:
    """See that an opened picture can be decoded and converted within the limit on memory.

    Args:
        name: What errors call it.
        num_bytes: The file's size.
        image: The picture, at the scale at which it is to be decoded.

    Raises:
        DataError: It takes more than that.
    """
    kind = "progressive" if "progressive" in image.info else image.format or ""
    per_pixel = _BYTES_PER_PIXEL.get(kind, _OTHERS_BYTES_PER_PIXEL)
    check_size(name, num_bytes, image.width * image.height, per_pixel, f" for a {image.format} file")


def check_size(name: Path | str, num_bytes: int, num_pixels: int, bytes_per_pixel: int, kind: str = "") -> None:
    """`check_memory` by numbers."""
    if num_bytes + num_pixels * bytes_per_pixel > MAX_MEMORY_BYTES:
        most = max(0, MAX_MEMORY_BYTES - num_bytes) // bytes_per_pixel
        raise DataError(
            f"the picture {name} has {num_pixels:,} pixels, too many to decode in memory",
            allowed=f"up to {most:,} pixels{kind}",
            fix="make it smaller, or take it out",
        )


def check_scans(name: Path | str, content: bytes, size: tuple[int, int]) -> None:
    """See that a progressive JPEG file does not go over its picture again and again.

    Raises:
        DataError: It has too many scans for its size.
    """
    num_scans = content.count(b"\xff\xda")
    if num_scans > min(_MANY_SCANS, _MAX_SCANNED_PIXELS // (size[0] * size[1])):
        raise DataError(
            f"the picture {name} has {num_scans:,} scans, which would take long to decode",
            cause="made to waste time, or a damaged file",
            fix="save it anew, or take it out",
        )


def _is_long_winded(content: bytes | bytearray) -> bool:
    """Whether a file has so many parts before its pixels that Pillow would take long to go through them."""
    if content[:3] == b"\xff\xd8\xff":
        return _has_many_segments(content)
    if content[:8] == b"\x89PNG\r\n\x1a\n":
        return _has_many_chunks(content)
    if content[:4] == b"GIF8":
        return _has_many_blocks(content)
    return content[:1] == b"P" and content[1:2] in b"123" and len(content) > _MAX_PLAIN_BYTES


def _has_many_segments(content: bytes | bytearray) -> bool:
    place, num_junk = 2, 0
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.match(content, place)
        num_junk += (len(content) if found is None else found.end()) - place
        if num_junk > _MAX_JUNK_BYTES:
            return True
        if found is None or found[1][0] == _START_OF_SCAN:
            return False
        place = found.end()
        if found[1][0] not in _MARKERS_ALONE:
            place += max(2, int.from_bytes(content[place : place + 2], "big"))
    return True


def _has_many_chunks(content: bytes | bytearray) -> bool:
    place = 8
    for _ in range(_MAX_CHUNKS):
        if place >= len(content):
            return False
        place += 12 + int.from_bytes(content[place : place + 4], "big")
    return True


def _has_many_blocks(content: bytes | bytearray) -> bool:
    """Whether comments and the like before a GIF file's first picture have many blocks of up to 255 bytes."""
    colours = content[10:11] or b"\0"
    place = 13 + (3 << (colours[0] & 7) + 1 if colours[0] & 0x80 else 0)
    for _ in range(MAX_SEGMENTS):
        if content[place : place + 1] in (b"", b"\x2c"):
            return False
        if content[place : place + 1] != b"\x21":
            place += 1  # Pillow skips what it does not know
            continue
        place += 2
        for _ in range(MAX_SEGMENTS):
            length = (content[place : place + 1] or b"\0")[0]
            place += 1 + length
            if not length:
                break
        else:
            return True
    return True


def _tiles_are_small(image: Image.Image) -> bool:
    """Whether a TIFF file's tiles fit the picture: each is decoded whole, however little of it shows."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return True
    width, height = image.tag_v2.get(_TILE_WIDTH, 0), image.tag_v2.get(_TILE_LENGTH, 0)
    return int(width) * int(height) <= max(4 * image.width * image.height, 1 << 24)


def enormous(name: Path | str, max_pixels: int = MAX_PIXELS) -> DataError:
    """The error for a picture of more pixels than are allowed."""
    return DataError(
        f"{name} claims to be a picture of more than {max_pixels:,} pixels",
        cause="a decompression bomb, or a damaged file",
        fix="make it smaller, or take it out",
    )


def too_large(name: Path | str, num_bytes: int) -> DataError:
    """The error for a file that is larger than any picture is allowed to be."""
    return DataError(
        f"{name} has {num_bytes:,} bytes, too many for a picture",
        allowed=f"up to {MAX_FILE_BYTES:,} bytes",
        fix="make it smaller, or take it out",
    )


def not_a_picture(name: Path | str, content: bytes | bytearray) -> DataError:
    """The error for a file of another kind."""
    if not content:
        return DataError(f"{name} is empty", allowed="a picture")
    return DataError(f"{name} is not a picture", allowed=FORMATS_TEXT)


def damaged(name: Path | str, error: Exception) -> DataError:
    """The error for a picture that can't be read or decoded."""
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{name} can't be read: {error.strerror or error}")
    return DataError(
        f"the picture {name} is damaged",
        reason=str(error) or type(error).__name__,
        fix="take it out, or put a whole one in its place",
    )
