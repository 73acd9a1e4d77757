"""Opening untrusted image files: a fixed list of formats, and limits checked before decoding (ADR 28).

Pillow supports about forty formats and chooses one by a file's content, whatever its name. One starts a program (EPS
runs Ghostscript), and several raise any kind of exception on a damaged file.
"""

import errno
import io
import os
import struct
import warnings
from pathlib import Path
from typing import NamedTuple

# Each import registers a format with Pillow, which otherwise imports all of its formats.
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

from samebits.config.plain_file import read_plain
from samebits.errors import DataError, cannot_read

_PLUGINS = (
    JpegImagePlugin.JpegImageFile, PngImagePlugin.PngImageFile, WebPImagePlugin.WebPImageFile,
    BmpImagePlugin.BmpImageFile, GifImagePlugin.GifImageFile, TiffImagePlugin.TiffImageFile,
    PpmImagePlugin.PpmImageFile,
)  # fmt: skip
FORMATS = tuple(plugin.format for plugin in _PLUGINS if plugin.format)
FORMATS_TEXT = "JPEG, PNG, WebP, BMP, GIF, TIFF or PPM"

# A file of a few bytes can claim any size. Pillow refuses to open more pixels.
MAX_PIXELS = 178_956_970
# Peak memory of reading an image: the file and the decoder.
MAX_MEMORY_BYTES = 700_000_000
MAX_FILE_BYTES = 256 * 1024 * 1024

# Peak bytes a pixel of decoding and conversion to RGB. Pillow stores four bytes a pixel.
# Measured by tests/unit/data/test_picture_limits.py. A progressive JPEG file keeps all coefficients until its end.
_BYTES_PER_PIXEL = {"progressive": 12, "WEBP": 17, "TIFF": 12}
_OTHERS_BYTES_PER_PIXEL = 9
# JPEG files decoded without Pillow.
BASELINE_BYTES_PER_PIXEL, PROGRESSIVE_BYTES_PER_PIXEL = 3, 9
# Limits on the scans of a progressive JPEG file. Usual files have about 10 scans. Each scan decodes the whole image,
# even if it has only a few bytes.
_MAX_SCANNED_PIXELS, _MANY_SCANS = 2_000_000_000, 100

_MAX_SEGMENTS = 10_000  # of a JPEG file before its pixels; usual files have about ten

_TILE_WIDTH, _TILE_LENGTH = 322, 323  # TIFF tags


def read_content(path: Path | str) -> bytes:
    """Read a regular file.

    Raises:
        DataError: The file can't be read, is a FIFO or a device, or is too large for an image.
    """
    try:
        return read_plain(Path(path), MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise too_large(path, os.stat(path).st_size) from None
        raise damaged(path, error) from error


def open_image(content: bytes | bytearray, name: Path | str) -> Image.Image:
    """Open an image of an allowed format, without decoding its pixels.

    Raises:
        DataError: It is not an image of these formats, is damaged, or claims too many pixels.
    """
    try:
        with warnings.catch_warnings():
            # Pillow warns from half of MAX_PIXELS, and raises DecompressionBombError above MAX_PIXELS.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        is_small = _tiles_are_small(image)
    except Image.DecompressionBombError:
        raise enormous(name) from None
    except UnidentifiedImageError:
        raise not_an_image(name, content) from None
    except Exception as error:  # Pillow's parsers raise any kind of exception
        raise damaged(name, error) from error
    if not is_small:
        raise enormous(name)
    return image


def check_memory(name: Path | str, num_bytes: int, image: Image.Image) -> None:
    """Check that an opened image can be decoded and converted within the memory limit.

    Raises:
        DataError: It would take more memory.
    """
    kind = "progressive" if "progressive" in image.info else image.format or ""
    per_pixel = _BYTES_PER_PIXEL.get(kind, _OTHERS_BYTES_PER_PIXEL)
    check_size(name, num_bytes, image.width * image.height, per_pixel, f" for a {image.format} file")


def check_size(name: Path | str, num_bytes: int, num_pixels: int, bytes_per_pixel: int, kind: str = "") -> None:
    """Check the memory limit; see `check_memory`. `kind`: text behind the limit in the error, ` for a TIFF file`."""
    if num_bytes + num_pixels * bytes_per_pixel > MAX_MEMORY_BYTES:
        most = max(0, MAX_MEMORY_BYTES - num_bytes) // bytes_per_pixel
        raise DataError(
            f"image {name} has {num_pixels:,} pixels, too many to decode in memory",
            allowed=f"up to {most:,} pixels{kind}",
            fix="Resize the image, or remove it from the dataset.",
        )


def check_scans(name: Path | str, content: bytes, size: tuple[int, int]) -> None:
    """Check the number of scans of a progressive JPEG file of (width, height) pixels: each decodes the whole image."""
    # Compressed data does not have these two bytes: JPEG writes FF as FF00 there.
    num_scans = content.count(b"\xff\xda")
    if num_scans > min(_MANY_SCANS, _MAX_SCANNED_PIXELS // (size[0] * size[1])):
        raise DataError(
            f"image {name} has {num_scans:,} scans, which would take too long to decode",
            cause="the file is damaged, or made to waste time",
            fix="Save the image again, or remove it from the dataset.",
        )


class JpegHead(NamedTuple):
    """Header of a JPEG file.

    Attributes:
        size: (width, height) in pixels as stored.
        height_at: Offset of the height in the file, in bytes; it has two bytes.
        is_plain: Whether the file has 8 bits, three channels, no EXIF segment, which may have an orientation, and no
            Adobe segment, which may name another color space.
        is_progressive: Whether the decoder keeps the coefficients of the whole image and refines them in many scans.
    """

    size: tuple[int, int]
    height_at: int
    is_plain: bool
    is_progressive: bool

    @classmethod
    def find(cls, content: bytes) -> "JpegHead | None":
        """Parse the header, in a fifth of Pillow's time. Returns None if the file is not such a JPEG."""
        if content[:2] != b"\xff\xd8":
            return None
        offset, end, is_plain = 2, len(content) - 9, True
        for _ in range(_MAX_SEGMENTS):
            if offset >= end or content[offset] != 0xFF:
                return None
            marker = content[offset + 1]
            if marker in (0xC0, 0xC1, 0xC2):
                precision, height, width, num_channels = struct.unpack_from(">BHHB", content, offset + 4)
                is_plain = is_plain and (precision, num_channels) == (8, 3)
                return cls((width, height), offset + 5, is_plain, marker == 0xC2) if width and height else None
            if not (0xC4 <= marker <= 0xFE) or marker in (0xD8, 0xD9, 0xDA):
                return None
            is_plain = is_plain and marker not in (0xE1, 0xEE)
            offset += 2 + int.from_bytes(content[offset + 2 : offset + 4], "big")
        return None


def _tiles_are_small(image: Image.Image) -> bool:
    """Return whether a TIFF file's tiles fit its image: each is decoded completely, however little of it is visible."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return True
    width, height = image.tag_v2.get(_TILE_WIDTH, 0), image.tag_v2.get(_TILE_LENGTH, 0)
    return int(width) * int(height) <= max(4 * image.width * image.height, 1 << 24)


def enormous(name: Path | str, max_pixels: int = MAX_PIXELS) -> DataError:
    """Make the error for an image that claims too many pixels."""
    return DataError(
        f"{name} claims to be an image of more than {max_pixels:,} pixels",
        cause="the file is damaged, or a decompression bomb",
        fix="Resize the image, or remove it from the dataset.",
    )


def too_large(name: Path | str, num_bytes: int) -> DataError:
    """Make the error for a file above the size limit."""
    return DataError(
        f"{name} has {num_bytes:,} bytes, too many for an image",
        allowed=f"up to {MAX_FILE_BYTES:,} bytes",
        fix="Compress the image, or remove it from the dataset.",
    )


def not_an_image(name: Path | str, content: bytes | bytearray) -> DataError:
    """Make the error for a file that is not an image."""
    fix = "Replace the file, or remove it from the dataset."
    if not content:
        return DataError(f"{name} is empty", allowed=FORMATS_TEXT, fix=fix)
    return DataError(f"{name} is not an image", allowed=FORMATS_TEXT, fix=fix)


def unscaled(name: Path | str) -> DataError:
    """Make the error for a 16-bit image whose values end where those of 12 bits do."""
    return DataError(
        f"image {name} has 16 bits and would be nearly black",
        given="no value above 4,111 of 65,535",
        cause="a camera of 12 bits or fewer stored its values without scaling them",
        fix="Scale the values up to 65,535, or save the image with 8 bits.",
    )


def damaged(name: Path | str, error: Exception) -> DataError:
    """Make the error for an image that cannot be read or decoded."""
    if isinstance(error, OSError) and error.errno is not None:
        return cannot_read(DataError, name, error, "Check the path and the permissions of the file.")
    return DataError(
        f"image {name} is damaged",
        cause=str(error) or type(error).__name__,
        fix="Replace the file, or remove it from the dataset.",
    )
