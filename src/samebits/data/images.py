"""Open untrusted image files within limits, and decode them to 8-bit RGB, as an image viewer shows them."""

import errno
import io
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Each import registers a format with Pillow, which otherwise imports all of its formats.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from samebits.errors import DataError, SamebitsError, cannot_read
from samebits.plain_file import open_plain, read_plain

# Opening untrusted image files: a fixed list of formats, and limits checked before decoding (ADR 28).
#
# Pillow supports about forty formats and chooses one by a file's content, whatever its name. One starts a program (EPS
# runs Ghostscript), and several raise any kind of exception on a damaged file.


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
BASELINE_BYTES_PER_PIXEL = 3
PROGRESSIVE_BYTES_PER_PIXEL = 9
# Limits on the scans of a progressive JPEG file. Usual files have about 10 scans. Each scan decodes the whole image,
# even if it has only a few bytes.
_MAX_SCANNED_PIXELS = 2_000_000_000
_MANY_SCANS = 100

HEAD_BYTES = 1 << 16  # of a file, in which most formats have the size of the image
_MAX_LOOKED_AT = 1000  # files whose sizes are compared before training: a fraction of a second

# TIFF tags
_TILE_WIDTH = 322
_TILE_LENGTH = 323


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


def looked_at(names: Sequence[str]) -> Sequence[str]:
    """Return evenly spaced names, at most a thousand: where sizes do not fit, they rarely do so in a single image."""
    return names[:: -(-len(names) // _MAX_LOOKED_AT) or 1]


def read_head(path: Path | str) -> bytes:
    """Read the beginning of a file. Raises DataError if it can't be read, or is no regular file."""
    try:
        with open_plain(Path(path)) as file:
            return file.read(HEAD_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise damaged(path, error) from error


def stored_size(head: bytes) -> tuple[int, int] | None:
    """Return (width, height) as stored, from the first bytes of an image file; None where they do not have it."""
    try:
        return open_image(head, "").size
    except DataError:  # its size is elsewhere, or it is no image: both are found when it is read
        return None


def open_image(content: bytes, name: Path | str) -> Image.Image:
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
    check_size(
        name, num_bytes, image.width * image.height, per_pixel, f" for a {image.format} file"
    )


def check_size(
    name: Path | str, num_bytes: int, num_pixels: int, bytes_per_pixel: int, kind: str = ""
) -> None:
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


def _tiles_are_small(image: Image.Image) -> bool:
    """Return whether a TIFF file's tiles fit its image: each is decoded completely, however little of it is visible."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return True
    width = image.tag_v2.get(_TILE_WIDTH, 0)
    height = image.tag_v2.get(_TILE_LENGTH, 0)
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


def not_an_image(name: Path | str, content: bytes) -> DataError:
    """Make the error for a file that is not an image."""
    return DataError(
        f"{name} is {'not an image' if content else 'empty'}",
        allowed=FORMATS_TEXT,
        fix="Replace the file, or remove it from the dataset.",
    )


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
        return cannot_read(
            DataError, name, error, "Check the path and the permissions of the file."
        )
    return DataError(
        f"image {name} is damaged",
        cause=str(error) or type(error).__name__,
        fix="Replace the file, or remove it from the dataset.",
    )


# Decode image files of any format to 8-bit RGB, as an image viewer shows them.
#
# The EXIF orientation is applied. Gray, CMYK, palette and 16-bit images are converted, transparent parts are blended
# over white, and the first frame of an animation is used. To save time, JPEG files can be decoded at 1/2 to 1/8 of
# their size.


ByteArray = npt.NDArray[np.uint8]

SCALES = (8, 4, 2, 1)  # a JPEG file can be decoded at 1/scale of its size

_ORIENTATION = 0x0112
# Warnings of libjpeg about missing or wrong data, in whose place it invents pixels.
_LOST = ("Corrupt JPEG data", "Premature end", "Inconsistent progression")
_PADDING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
_MAX_PADDING = 16  # bytes
_DARK = 16  # of 255: white of 12 bits, if it is read as 16 bits
# larger images are converted in strips, since each conversion makes one or more copies
_STRIP_PIXELS = 1 << 22


def read_rgb(path: Path) -> ByteArray:
    """Read an image file as (H, W, 3) bytes, with its EXIF orientation applied.

    Raises:
        DataError: The file cannot be read, is not an image, is damaged, or exceeds the pixel limit.
    """
    return EncodedImage(path).pixels()


class EncodedImage:
    """An image file that is decoded on demand.

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
        self,
        path: Path | str,
        content: bytes | None = None,
        *,
        max_pixels: int = MAX_PIXELS,
        upright: bool = True,
    ) -> None:
        self.path = path
        self._content = read_content(path) if content is None else content
        image = open_image(self._content, path)
        if image.width * image.height > max_pixels:
            raise enormous(path, max_pixels)
        self._image: Image.Image | None = image
        is_jpeg = image.format in ("JPEG", "MPO")
        self._is_progressive = "progressive" in image.info
        if self._is_progressive:
            check_scans(path, self._content, image.size)
        try:
            # Of 16-bit colors Pillow keeps the upper 8 bits. It scales the values of a PGM file by their maximum.
            self._is_deep = ";16" in str(getattr(image, "tile", "")) or (
                image.mode[0] == "I" and image.format != "PPM"
            )
            if not is_jpeg:
                check_memory(path, len(self._content), image)
                image.load()  # the EXIF of a PNG can follow its pixels; loading also detects damage
        except SamebitsError:
            raise
        except Exception as error:
            raise damaged(path, error) from error
        self.orientation = _orientation(image, is_jpeg) if upright else 1
        width, height = image.size
        # 5 to 8 include a rotation by 90°
        self.size = (height, width) if self.orientation >= 5 else (width, height)
        self.is_scalable = is_jpeg and image.mode in ("RGB", "L")
        # A truncated file has no end marker. It is left to Pillow, which names the damage.
        self._is_plain = (
            image.format == "JPEG"
            and image.mode == "RGB"
            and self.orientation == 1
            and b"\xff\xd9" in self._content[-1024:]
        )

    def pixels(self, scale: int = 1) -> ByteArray:
        """Decode the image; to be called once.

        Args:
            scale: Decode at 1/scale of the size: 1, 2, 4 or 8. Must be 1 if the file is not scalable.

        Returns:
            (H, W, 3) bytes, upright. H and W are the size divided by the scale, rounded up.

        Raises:
            DataError: The file is damaged.
        """
        try:
            if self._is_plain:
                num_pixels = self.size[0] * self.size[1]
                if self._is_progressive:
                    per_pixel = PROGRESSIVE_BYTES_PER_PIXEL
                else:
                    num_pixels //= scale**2
                    per_pixel = BASELINE_BYTES_PER_PIXEL
                check_size(self.path, len(self._content), num_pixels, per_pixel)
                try:
                    return decode_plain_jpeg(self._content, scale)
                except ValueError as error:
                    if _is_loss(error):
                        raise
            pixels = _to_rgb(self._loaded(scale))
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
            return self._loaded(1)
        except SamebitsError:
            raise
        except Exception as error:
            raise damaged(self.path, error) from error

    def _loaded(self, scale: int) -> Image.Image:
        image = self._image or open_image(self._content, self.path)
        self._image = None  # frees it once the copies below are made
        if scale > 1:
            assert isinstance(image, ImageFile.ImageFile)
            if self._is_progressive:  # it keeps its coefficients at full size
                check_memory(self.path, len(self._content), image)
            image.draft(image.mode, (max(1, image.width // scale), max(1, image.height // scale)))
        check_memory(self.path, len(self._content), image)
        image.load()
        if image.format in ("JPEG", "MPO"):
            _check_complete(self._content, "CMYK" if image.mode == "CMYK" else "GRAY")
        return ImageOps.exif_transpose(image) if self.orientation != 1 else image


def decode_plain_jpeg(content: bytes, scale: int = 1) -> ByteArray:
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
        least_height = -(-height // scale)
        least_width = -(-width // scale)
    pixels: ByteArray = simplejpeg.decode_jpeg(
        content,
        "RGB",
        min_height=least_height,
        min_width=least_width,
        min_factor=1,
        strict=True,
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
    except (
        Exception
    ):  # a damaged EXIF segment, which raises many types, does not make the image unusable
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> ByteArray:
    """Convert any image to (H, W, 3) RGB bytes: 16 and 32 bits are scaled, transparent parts blended over white."""
    width, height = image.size
    if (
        image.format == "BMP"
        and image.mode == "RGBA"
        and image.getchannel("A").getextrema()[1] == 0
    ):
        image = image.convert("RGB")  # Windows leaves the fourth byte of a pixel unused
    rows = max(1, _STRIP_PIXELS // width)
    if rows >= height:
        return _strip_to_rgb(image, _white(image))
    white = max(
        _white(image.crop((0, top, width, min(height, top + rows))))
        for top in range(0, height, rows)
    )
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
