"""Reads image files of any kind as RGB, as an image viewer shows them.

The EXIF orientation is applied. Grey, CMYK, palette and 16-bit images are converted to 8-bit RGB, transparency is
blended with white, and of an animation the first frame is used. JPEG files can be decoded at 1/2, 1/4 or 1/8 of their
size, and only down to the last row that is needed. Both save time.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile, ImageOps

from lockstep.data.image_file import (
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

SCALES = (8, 4, 2, 1)  # a JPEG file can be decoded at 1 / scale of its size

_ORIENTATION = 0x0112
# Extra rows that are decoded below the needed ones. With chroma subsampling, two rows share their colours, which are
# blended with those of the next two rows.
_MORE_ROWS = 2
_STRIP_PIXELS = 1 << 22  # larger images are converted in strips: each conversion is a copy or more


def read_rgb(path: Path) -> ByteArray:
    """Read an image file as (H, W, 3) bytes, upright.

    Raises:
        DataError: The file can't be read, is not an image, is damaged, or has too many pixels.
    """
    return EncodedImage(path).pixels()


class EncodedImage:
    """An image file that is not decoded yet. Of a JPEG file, only the header was read.

    Args:
        path: The file; or its name in errors, if `content` is given.
        content: The file's content.
        max_pixels: A lower limit than the one for all images.
        upright: Whether to apply the EXIF orientation.

    Attributes:
        path: The file; or its name in errors.
        size: (width, height) of the upright image, pixels.
        is_scalable: Whether it can be decoded at a fraction of its size.

    Raises:
        DataError: The file can't be read, is not an image, is damaged, or has too many pixels.
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
        # A truncated file has no end marker. Pillow reads all of such a file, so the damage is noticed even if the
        # lower part is not needed.
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
        """Decode the image.

        Args:
            scale: 1, 2, 4 or 8: decode at 1 / scale of the size. Only 1 if the image is not scalable.
            bottom_px: The first row that is not needed, at this scale. Rows below it may be missing.

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
        except Exception as error:  # decoders raise errors of any class
            raise damaged(self.path, error) from error

    def image(self) -> Image.Image:
        """Decode to an upright Pillow image in the mode of the file.

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
        self._image = None  # so that it does not stay in memory next to its copy
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
                image.load()  # the EXIF of a PNG file can follow its pixels; damage is noticed here
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
        """Return the file with a smaller height in its header where possible, so that decoders skip the rows below."""
        can_cut = self.is_scalable and not self._is_turned and self._has_end
        if self._height_at is None or not can_cut or num_rows >= self.size[1]:
            return self._content
        content = bytearray(self._content)
        content[self._height_at : self._height_at + 2] = num_rows.to_bytes(2, "big")
        return content


class JpegHead(NamedTuple):
    """The header of a JPEG file.

    Attributes:
        size: (width, height) as stored, before the EXIF orientation.
        height_at: Offset of the height in the file, two bytes.
        is_plain: Whether it has 8 bits, three colours, no EXIF segment (possible orientation) and no Adobe segment
            (possible other colour space).
        is_progressive: Whether the decoder keeps the coefficients of the whole image and refines them many times.
    """

    size: tuple[int, int]
    height_at: int
    is_plain: bool
    is_progressive: bool

    @classmethod
    def find(cls, content: bytes) -> JpegHead | None:
        """Find the header, in a fifth of the time that Pillow takes. None if there is none."""
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
    """Decode to (H, W, 3) bytes, equal to Pillow's, which would write four bytes a pixel first.

    Raises:
        ValueError: The file is damaged.
    """
    least_height = least_width = 0
    if scale > 1:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content)
        least_height, least_width = -(-height // scale), -(-width // scale)
    # Not strict, as in Pillow: the decoder also warns about rows below the requested ones.
    pixels: ByteArray = simplejpeg.decode_jpeg(
        content, "RGB", min_height=least_height, min_width=least_width, min_factor=1, strict=False
    )
    return pixels


def _orientation(image: Image.Image, is_jpeg: bool) -> int:
    if is_jpeg and "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a broken EXIF block does not make the image unusable; it can fail in many ways
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> ByteArray:
    """Convert an image in any mode to 8-bit RGB: 16-bit greys are scaled, transparency is blended with white.

    Args:
        image: Loaded and upright.

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
    """Return the value of white in a grey image of 16 or 32 bits; for floats, that of the brightest pixel."""
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
