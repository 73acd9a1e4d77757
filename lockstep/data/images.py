"""Picture files of any kind, read as RGB: what a person sees when they open the file.

Turned as their EXIF says; grey, CMYK, palette and 16-bit pictures brought to 8-bit RGB; transparent parts over white;
of an animation the first picture. JPEG files can be read at a half, a quarter or an eighth of their size, and only down
to the last row that is needed: both skip a part of the work.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile, ImageOps

from lockstep.data.picture_file import (
    BASELINE_BYTES_PER_PIXEL,
    MAX_PIXELS,
    MAX_SEGMENTS,
    PROGRESSIVE_BYTES_PER_PIXEL,
    check_memory,
    check_scans,
    check_size,
    damaged,
    enormous,
    open_image,
    read_content,
)
from lockstep.errors import LockstepError

ByteArray = npt.NDArray[np.uint8]

SCALES = (8, 4, 2, 1)  # by which a JPEG file can be read smaller

_ORIENTATION = 0x0112
# Rows below those that are needed that are decoded too: where colours are stored for two rows at a time, they are
# blended with those of the next two.
_MORE_ROWS = 2
_STRIP_PIXELS = 1 << 22  # larger pictures are converted in strips: each conversion is a copy or more


def read_rgb(path: Path) -> ByteArray:
    """Read a picture file: (H, W, 3) bytes, upright.

    Raises:
        DataError: The file can't be read, is no picture, is damaged, or claims to be enormous.
    """
    return Picture(path).pixels()


class Picture:
    """A picture file; of a JPEG file so far only the head was looked at.

    Args:
        path: The file; or, where its content is given, what errors call it.
        content: The file's content.
        max_pixels: A lower limit than the one for all pictures.
        upright: Whether the picture is turned as its EXIF says.

    Attributes:
        path: The file; or, where its content was given, what it is called.
        size: (width, height) as it is shown, pixels.
        is_scalable: Whether it can be read at a part of its size.

    Raises:
        DataError: The file can't be read, is no picture, is damaged, or claims to be enormous.
    """

    def __init__(
        self, path: Path | str, content: bytes | None = None, *, max_pixels: int = MAX_PIXELS, upright: bool = True
    ) -> None:
        self.path = path
        self._content = read_content(path) if content is None else content
        self._max_pixels, self._upright = max_pixels, upright
        self._image: Image.Image | None = None
        head = JpegHead.find(self._content)
        self._height_at = None if head is None else head.height_at
        # A file that was cut off has no end marker. What to make of one is left to Pillow, which then reads all of it:
        # so it is found out even where its lower part isn't needed.
        self._has_end = b"\xff\xd9" in self._content[-1024:]
        self._is_baseline = head is not None and not head.is_progressive
        if head is not None and head.is_plain and self._has_end:
            self._check_pixels(head.size)
            if head.is_progressive:
                check_scans(path, self._content, head.size)
            self.size, self.is_scalable, self._is_turned, self._is_plain = head.size, True, False, True
        else:
            self._look_closer()

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
                self._check_plain(scale)
                return decode_plain_jpeg(content, scale)
            return _to_rgb(self._loaded(content, scale))
        except LockstepError:
            raise
        except Exception as error:  # decoders raise whatever comes up
            raise damaged(self.path, error) from error

    def image(self) -> Image.Image:
        """Decode for Pillow: upright, in the mode that the file has.

        Raises:
            DataError: The file is damaged.
        """
        try:
            return self._loaded(self._content, 1)
        except LockstepError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error

    def _loaded(self, content: bytes | bytearray, scale: int) -> Image.Image:
        image = self._open(content)
        self._image = None  # so that it does not stay in memory beside its copy
        if scale > 1:
            assert isinstance(image, ImageFile.ImageFile)
            if not self._is_baseline:  # keeps its coefficients at full size
                check_memory(self.path, len(content), image)
            image.draft(image.mode, (max(1, image.width // scale), max(1, image.height // scale)))
        check_memory(self.path, len(content), image)
        image.load()
        return ImageOps.exif_transpose(image) if self._is_turned else image

    def _check_plain(self, scale: int) -> None:
        num_pixels = self.size[0] * self.size[1]
        if self._is_baseline:
            check_size(self.path, len(self._content), num_pixels // scale**2, BASELINE_BYTES_PER_PIXEL)
        else:
            check_size(self.path, len(self._content), num_pixels, PROGRESSIVE_BYTES_PER_PIXEL)

    def _check_pixels(self, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._max_pixels:
            raise enormous(self.path, self._max_pixels)

    def _look_closer(self) -> None:
        image = self._open(self._content)
        self._check_pixels(image.size)
        is_jpeg = image.format in ("JPEG", "MPO")
        if "progressive" in image.info:
            check_scans(self.path, self._content, image.size)
        try:
            if not is_jpeg:
                check_memory(self.path, len(self._content), image)
                image.load()  # a PNG's EXIF can stand behind its pixels; what is damaged comes out here
        except LockstepError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error
        orientation = _orientation(image, is_jpeg) if self._upright else 1
        width, height = image.size
        self.size = (height, width) if orientation >= 5 else (width, height)  # 5 to 8 lie on their side
        self.is_scalable = is_jpeg and image.mode in ("RGB", "L")
        self._is_turned = orientation != 1
        self._is_plain = image.format == "JPEG" and image.mode == "RGB" and not self._is_turned and self._has_end
        self._image = image

    def _open(self, content: bytes | bytearray) -> Image.Image:
        if self._image is not None and content is self._content:
            return self._image
        return open_image(content, self.path)

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
        is_progressive: Whether the decoder keeps the coefficients of the whole picture, and goes over them many times.
    """

    size: tuple[int, int]
    height_at: int
    is_plain: bool
    is_progressive: bool

    @classmethod
    def find(cls, content: bytes) -> JpegHead | None:
        """Look for it, in a fifth of the time that Pillow takes; None where it isn't found."""
        if content[:2] != b"\xff\xd8":
            return None
        place, end, is_plain = 2, len(content) - 9, True
        for _ in range(MAX_SEGMENTS):
            if place >= end or content[place] != 0xFF:
                return None
            marker = content[place + 1]
            if marker in (0xC0, 0xC1, 0xC2):
                precision, height, width, num_colours = struct.unpack_from(">BHHB", content, place + 4)
                is_plain = is_plain and (precision, num_colours) == (8, 3)
                return cls((width, height), place + 5, is_plain, marker == 0xC2) if width and height else None
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
    width, height = image.size
    rows = max(1, _STRIP_PIXELS // width)
    if rows >= height:
        return _strip_to_rgb(image, _white(image))
    white = max(_white(image.crop((0, top, width, min(height, top + rows)))) for top in range(0, height, rows))
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        pixels[top:bottom] = _strip_to_rgb(image.crop((0, top, width, bottom)), white)
    return pixels


def _white(image: Image.Image) -> float:
    """The value that stands for white in a grey picture of 16 or 32 bits; of floats, the brightest pixel's."""
    if not image.mode.startswith("F"):
        return 65535.0
    return max(1.0, float(np.asarray(image).max(initial=0.0)))


def _strip_to_rgb(image: Image.Image, white: float) -> ByteArray:
    if image.mode[0] in "IF":  # 16 and 32 bits; Pillow's own conversion would cut off everything above 255
        wide = np.asarray(image, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # floats of a file can be NaN
            grey = np.clip(wide * (255 / white), 0, 255).round().astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode != "RGB":
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    return np.array(image)
