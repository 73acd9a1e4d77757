"""Picture files of any kind, read as RGB: what a person sees when they open the file.

Turned as their EXIF says; grey, CMYK, palette and 16-bit pictures brought to 8-bit RGB; transparent parts over white;
of an animation the first picture. JPEG files can be read at a half, a quarter or an eighth of their size, and only down
to the last row that is needed: both skip a part of the work.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from lockstep.errors import DataError

ByteArray = npt.NDArray[np.uint8]

# A file of a few bytes can claim any size. Pillow refuses from here on too.
MAX_PIXELS = 178_956_970
SCALES = (8, 4, 2, 1)  # by which a JPEG file can be read smaller

_ORIENTATION = 0x0112
# Rows below those that are needed that are decoded too: where colours are stored for two rows at a time, they are
# blended with those of the next two.
_MORE_ROWS = 2
_FAULTS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError, KeyError, TypeError)


def read_rgb(path: Path) -> ByteArray:
    """Read a picture file: (H, W, 3) bytes, upright.

    Raises:
        DataError: The file can't be read, is no picture, is damaged, or claims to be enormous.
    """
    return Picture(path).pixels()


class Picture:
    """A picture file; of a JPEG file so far only the head was looked at.

    Attributes:
        path: The file; or, where its content was given, what it is called.
        size: (width, height) as it is shown, pixels.
        is_scalable: Whether it can be read at a part of its size.

    Raises:
        DataError: The file can't be read, is no picture, is damaged, or claims to be enormous.
    """

    def __init__(self, path: Path | str, content: bytes | None = None) -> None:
        self.path = path
        try:
            self._content = _content(path) if content is None else content
        except OSError as error:
            raise _damaged(path, error) from error
        self._image: Image.Image | None = None
        head = JpegHead.find(self._content)
        self._height_at = None if head is None else head.height_at
        # A file that was cut off has no end marker. What to make of one is left to Pillow, which then reads all of it:
        # so it is found out even where its lower part isn't needed.
        self._has_end = b"\xff\xd9" in self._content[-1024:]
        if head is not None and head.is_plain and self._has_end:
            self.size, self.is_scalable, self._is_turned, self._is_plain = head.size, True, False, True
        else:
            self._look_closer()
        if self.size[0] * self.size[1] > MAX_PIXELS:
            raise _enormous(path)

    def pixels(self, scale: int = 1, *, bottom_px: int | None = None) -> ByteArray:
        """Decode, once.

        Args:
            scale: 1, 2, 4 or 8: how much smaller the picture is read. For 1 only, if it is not scalable.
            bottom_px: The first row that is not needed, at this scale; what lies below may be missing.

        Returns:
            (H, W, 3) bytes, upright; H and W are the size over the scale, rounded up.

        Raises:
            DataError: The file is damaged.
        """
        try:
            content = self._content if bottom_px is None else self._cut(scale * (bottom_px + _MORE_ROWS))
            if self._is_plain:
                return decode_plain_jpeg(content, scale)
            image = self._open(content)
            if scale > 1:
                assert isinstance(image, ImageFile.ImageFile)
                image.draft(image.mode, (max(1, image.width // scale), max(1, image.height // scale)))
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image) if self._is_turned else image)
        except _FAULTS as error:
            raise _damaged(self.path, error) from error

    def _look_closer(self) -> None:
        try:
            image = self._open(self._content)
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            is_jpeg = image.format in ("JPEG", "MPO")
            if not is_jpeg:
                image.load()  # a PNG's EXIF can stand behind its pixels; what is damaged comes out here
        except Image.DecompressionBombError:
            raise _enormous(self.path) from None
        except UnidentifiedImageError:
            raise _not_a_picture(self.path, self._content) from None
        except _FAULTS as error:
            raise _damaged(self.path, error) from error
        orientation = _orientation(image, is_jpeg)
        width, height = image.size
        self.size = (height, width) if orientation >= 5 else (width, height)  # 5 to 8 lie on their side
        self.is_scalable = is_jpeg and image.mode in ("RGB", "L")
        self._is_turned = orientation != 1
        self._is_plain = image.format == "JPEG" and image.mode == "RGB" and not self._is_turned and self._has_end
        self._image = image

    def _open(self, content: bytes | bytearray) -> Image.Image:
        if self._image is not None and content is self._content:
            return self._image
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS is our limit
            return Image.open(io.BytesIO(content))

    def _cut(self, num_rows: int) -> bytes | bytearray:
        """The file, where possible as that of a picture of so many rows: decoders then leave out what is below."""
        can_cut = self.is_scalable and not self._is_turned and self._has_end
        if self._height_at is None or not can_cut or num_rows >= self.size[1]:
            return self._content
        content = bytearray(self._content)
        content[self._height_at : self._height_at + 2] = num_rows.to_bytes(2, "big")
        return content


class JpegHead(NamedTuple):
    """What stands before the pixels in a JPEG file.

    Attributes:
        size: (width, height) as it is stored.
        height_at: Where in the file the height stands, two bytes.
        is_plain: Whether nothing needs a closer look: 8 bits, three colours, no EXIF (which may say how to turn it) and
            nothing of Adobe's (which may say that the colours are others).
    """

    size: tuple[int, int]
    height_at: int
    is_plain: bool

    @classmethod
    def find(cls, content: bytes) -> JpegHead | None:
        """Look for it, in a fifth of the time that Pillow takes; None where it isn't found."""
        if content[:2] != b"\xff\xd8":
            return None
        place, end, is_plain = 2, len(content) - 9, True
        while place < end and content[place] == 0xFF:
            marker = content[place + 1]
            if marker in (0xC0, 0xC1, 0xC2):
                precision, height, width, num_colours = struct.unpack_from(">BHHB", content, place + 4)
                is_plain = is_plain and (precision, num_colours) == (8, 3)
                return cls((width, height), place + 5, is_plain) if width and height else None
            if not (0xC4 <= marker <= 0xFE) or marker in (0xD8, 0xD9, 0xDA):
                return None
            is_plain = is_plain and marker not in (0xE1, 0xEE)
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
        return None


def decode_plain_jpeg(content: bytes | bytearray, scale: int = 1) -> ByteArray:
    """(H, W, 3) bytes, those of Pillow, which would write four bytes a pixel first.

    Raises:
        ValueError: The file is damaged.
    """
    least_height = least_width = 0
    if scale > 1:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content)
        least_height, least_width = -(-height // scale), -(-width // scale)
    # Not strict, as Pillow isn't: a warning is given for what lies below the rows that are asked for too.
    pixels: ByteArray = simplejpeg.decode_jpeg(
        content, "RGB", min_height=least_height, min_width=least_width, min_factor=1, strict=False
    )
    return pixels


def _content(path: Path | str) -> bytes:
    """All of a file: as `Path.read_bytes`, without the file object, which takes longer than the reading."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = os.read(number, os.fstat(number).st_size + 1)
        while more := os.read(number, 1 << 20):
            content += more
        return content
    finally:
        os.close(number)


def _orientation(image: Image.Image, is_jpeg: bool) -> int:
    if is_jpeg and "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block is no reason to lose the picture; it can fail in many ways
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> ByteArray:
    """Bring a picture in any mode to 8-bit colours: wide greys scaled down, transparent parts over white.

    Args:
        image: Loaded, and turned as it is to be seen.

    Returns:
        (H, W, 3) bytes.
    """
    if image.mode[0] in "IF":  # 16 and 32 bits; Pillow's own conversion would cut off everything above 255
        wide = np.asarray(image, dtype=np.float64)
        white = 65535.0 if image.mode.startswith("I") else max(1.0, float(wide.max(initial=0.0)))
        grey = np.clip(wide * (255 / white), 0, 255).round().astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode != "RGB":
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    return np.array(image)


def _enormous(path: Path | str) -> DataError:
    return DataError(
        f"{path} claims to be a picture of more than {MAX_PIXELS:,} pixels",
        likely="a decompression bomb, or a damaged file",
        do="make it smaller, or take it out",
    )


def _not_a_picture(path: Path | str, content: bytes) -> DataError:
    if not content:
        return DataError(f"{path} is empty", expected="a picture")
    return DataError(f"{path} is not a picture", expected="JPEG, PNG or another form that Pillow reads")


def _damaged(path: Path | str, error: Exception) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(f"{path} can't be read: {error.strerror or error}")
    return DataError(
        f"the picture {path} is damaged",
        reason=str(error) or type(error).__name__,
        do="take it out, or put a whole one in its place",
    )
