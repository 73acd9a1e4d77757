"""Decode image files of any format to 8-bit RGB, as an image viewer shows them.

The EXIF orientation is applied. Gray, CMYK, palette and 16-bit images are converted, transparent parts are blended over
white, and the first frame of an animation is used. To save time, JPEG files can be decoded at 1/2 to 1/8 of their size.
"""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps

from samebits.data.image_file import (
    BASELINE_BYTES_PER_PIXEL,
    MAX_PIXELS,
    PROGRESSIVE_BYTES_PER_PIXEL,
    JpegHead,
    check_memory,
    check_scans,
    check_size,
    damaged,
    enormous,
    open_image,
    read_content,
    unscaled,
)
from samebits.errors import SamebitsError

ByteArray = npt.NDArray[np.uint8]

SCALES = (8, 4, 2, 1)  # a JPEG file can be decoded at 1/scale of its size

_ORIENTATION = 0x0112
# Extra rows to decode below those that are needed: with vertical chroma subsampling, the chroma of two rows is
# interpolated with that of the next two.
_MORE_ROWS = 2
# Warnings of libjpeg about missing or wrong data, in whose place it invents pixels.
_LOST = ("Corrupt JPEG data", "Premature end", "Inconsistent progression")
_PADDING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_MAX_PADDING = 16  # bytes
_DARK = 16  # of 255: white of 12 bits, if it is read as 16 bits
_STRIP_PIXELS = 1 << 22  # larger images are converted in strips, since each conversion makes one or more copies


def read_rgb(path: Path) -> ByteArray:
    """Read an image file as (H, W, 3) bytes, with its EXIF orientation applied.

    Raises:
        DataError: The file cannot be read, is not an image, is damaged, or exceeds the pixel limit.
    """
    return EncodedImage(path).pixels()


class EncodedImage:
    """An image file that is decoded on demand. The constructor parses only the header of a plain JPEG file.

    Args:
        path: The file; with `content`, the name for errors.
        content: The content of the file. None: it is read from `path`.
        max_pixels: Largest number of pixels.
        upright: Whether to apply the EXIF orientation.

    Attributes:
        path: The file, or the name for errors.
        size: (width, height) in pixels, after the orientation was applied.
        orientation: The EXIF orientation that is applied, 1 to 8; 1 means none.
        is_scalable: Whether the file can be decoded at a reduced size.

    Raises:
        DataError: The file cannot be read, is not an image, is damaged, or exceeds the pixel limit.
    """

    def __init__(
        self, path: Path | str, content: bytes | None = None, *, max_pixels: int = MAX_PIXELS, upright: bool = True
    ) -> None:
        self.path = path
        self._content = read_content(path) if content is None else content
        self._max_pixels, self._upright = max_pixels, upright
        self._image: Image.Image | None = None
        self._is_deep = False
        head = JpegHead.find(self._content)
        self._height_at = None if head is None else head.height_at
        # A truncated file has no end marker. It is left to Pillow, which decodes all of it. So the damage is found even
        # if the lower rows are not needed.
        self._has_end = b"\xff\xd9" in self._content[-1024:]
        self._is_baseline = head is not None and not head.is_progressive
        if head is not None and head.is_plain and self._has_end:
            self._check_pixels(head.size)
            if head.is_progressive:
                check_scans(path, self._content, head.size)
            self.size, self.is_scalable, self.orientation, self._is_plain = head.size, True, 1, True
        else:
            self._parse_with_pillow()

    def pixels(self, scale: int = 1, *, bottom_px: int | None = None) -> ByteArray:
        """Decode the image; to be called once.

        Args:
            scale: Decode at 1/scale of the size: 1, 2, 4 or 8. Must be 1 if the file is not scalable.
            bottom_px: Number of rows that are needed, at this scale. Rows below may be missing, and lost data of the
                rows above is not found. None: all rows.

        Returns:
            (H, W, 3) bytes, upright. H and W are the size divided by the scale, rounded up.

        Raises:
            DataError: The file is damaged.
        """
        try:
            content = self._content if bottom_px is None else self._cut(scale * (bottom_px + _MORE_ROWS))
            if self._is_plain:
                self._check_plain(scale)
                try:
                    return decode_plain_jpeg(content, scale, is_whole=content is self._content)
                except ValueError as error:
                    if _is_loss(error):
                        raise
            pixels = _to_rgb(self._loaded(content, scale))
            if self._is_deep and 0 < pixels.max(initial=0) <= _DARK:
                raise unscaled(self.path)
            return pixels
        except SamebitsError:
            raise
        except Exception as error:  # decoders raise many types
            raise damaged(self.path, error) from error

    def image(self) -> Image.Image:
        """Decode to a Pillow image: upright, in the mode of the file. Raises DataError if the file is damaged."""
        try:
            return self._loaded(self._content, 1)
        except SamebitsError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error

    def _loaded(self, content: bytes | bytearray, scale: int) -> Image.Image:
        image = self._open(content)
        self._image = None  # frees it once the copies below are made
        if scale > 1:
            assert isinstance(image, ImageFile.ImageFile)
            if not self._is_baseline:  # a progressive file keeps its coefficients at full size
                check_memory(self.path, len(content), image)
            image.draft(image.mode, (max(1, image.width // scale), max(1, image.height // scale)))
        check_memory(self.path, len(content), image)
        image.load()
        if image.format in ("JPEG", "MPO") and content is self._content:
            _check_complete(self._content, "CMYK" if image.mode == "CMYK" else "GRAY")
        return ImageOps.exif_transpose(image) if self.orientation != 1 else image

    def _check_plain(self, scale: int) -> None:
        num_pixels = self.size[0] * self.size[1]
        if self._is_baseline:
            check_size(self.path, len(self._content), num_pixels // scale**2, BASELINE_BYTES_PER_PIXEL)
        else:
            check_size(self.path, len(self._content), num_pixels, PROGRESSIVE_BYTES_PER_PIXEL)

    def _check_pixels(self, size: tuple[int, int]) -> None:
        if size[0] * size[1] > self._max_pixels:
            raise enormous(self.path, self._max_pixels)

    def _parse_with_pillow(self) -> None:
        image = self._open(self._content)
        self._check_pixels(image.size)
        is_jpeg = image.format in ("JPEG", "MPO")
        if "progressive" in image.info:
            check_scans(self.path, self._content, image.size)
        try:
            # Of 16-bit colors Pillow keeps the upper 8 bits. It scales the values of a PGM file by their maximum.
            self._is_deep = ";16" in str(getattr(image, "tile", "")) or (image.mode[0] == "I" and image.format != "PPM")
            if not is_jpeg:
                check_memory(self.path, len(self._content), image)
                image.load()  # the EXIF of a PNG can follow its pixels; loading also detects damage
        except SamebitsError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error
        self.orientation = _orientation(image, is_jpeg) if self._upright else 1
        width, height = image.size
        self.size = (height, width) if self.orientation >= 5 else (width, height)  # 5 to 8 include a rotation by 90°
        self.is_scalable = is_jpeg and image.mode in ("RGB", "L")
        self._is_plain = image.format == "JPEG" and image.mode == "RGB" and self.orientation == 1 and self._has_end
        self._image = image

    def _open(self, content: bytes | bytearray) -> Image.Image:
        if self._image is not None and content is self._content:
            return self._image
        return open_image(content, self.path)

    def _cut(self, num_rows: int) -> bytes | bytearray:
        """Return the file with its height set to `num_rows` where possible: decoders then skip the rows below."""
        can_cut = self.is_scalable and self.orientation == 1 and self._has_end
        if self._height_at is None or not can_cut or num_rows >= self.size[1]:
            return self._content
        content = bytearray(self._content)
        content[self._height_at : self._height_at + 2] = num_rows.to_bytes(2, "big")
        return content


def decode_plain_jpeg(content: bytes | bytearray, scale: int = 1, *, is_whole: bool = True) -> ByteArray:
    """Decode a plain JPEG file at 1/scale (1, 2, 4, 8) to Pillow's bits, without its copy of four bytes per pixel.

    Returns:
        (H, W, 3) bytes. H and W are the size divided by the scale, rounded up.

    Raises:
        ValueError: The file is damaged, or has an oddity without effect, which Pillow ignores.
    """
    import simplejpeg  # an optional package

    least_height = least_width = 0
    if scale > 1:
        height, width, _, _ = simplejpeg.decode_jpeg_header(content)
        least_height, least_width = -(-height // scale), -(-width // scale)
    pixels: ByteArray = simplejpeg.decode_jpeg(
        content, "RGB", min_height=least_height, min_width=least_width, min_factor=1, strict=is_whole
    )
    return pixels


def _check_complete(content: bytes, colors: str) -> None:
    """Decode a JPEG file at an eighth of its size. Raises ValueError for lost data, which Pillow ignores."""
    import simplejpeg

    try:
        simplejpeg.decode_jpeg(content, colors, min_height=1, min_width=1, strict=True)
    except ValueError as error:
        if _is_loss(error):
            raise


def _is_loss(error: ValueError) -> bool:
    """Return whether libjpeg invented pixels; it also warns about unknown versions and a few bytes of padding."""
    padding = _PADDING.search(str(error))
    return str(error).startswith(_LOST) and (padding is None or int(padding[1]) > _MAX_PADDING)


def _orientation(image: Image.Image, is_jpeg: bool) -> int:
    if is_jpeg and "exif" not in image.info:
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a damaged EXIF segment, which raises many types, does not make the image unusable
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> ByteArray:
    """Convert any image to (H, W, 3) RGB bytes: 16 and 32 bits are scaled, transparent parts blended over white."""
    width, height = image.size
    if image.format == "BMP" and image.mode == "RGBA" and image.getchannel("A").getextrema()[1] == 0:
        image = image.convert("RGB")  # Windows leaves the fourth byte of a pixel unused
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
    """Return the value of white in a gray image of 16 or 32 bits: of floats, the maximum, at least 1."""
    if not image.mode.startswith("F"):
        return 65535.0
    return max(1.0, float(np.asarray(image).max(initial=0.0)))


def _strip_to_rgb(image: Image.Image, white: float) -> ByteArray:
    if image.mode[0] in "IF":  # 16 and 32 bits, which Pillow's conversion would clip at 255
        wide = np.asarray(image, dtype=np.float64)
        with np.errstate(invalid="ignore"):  # a file can contain NaN
            gray = np.clip(wide * (255 / white), 0, 255).round().astype(np.uint8)
        return np.repeat(gray[:, :, None], 3, axis=2)
    if image.mode != "RGB":
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    return np.array(image)
