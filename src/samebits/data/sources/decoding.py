"""Values from the files of a sample, by their extension. No decoder runs code from the data: pickles stay bytes."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from samebits.data.images import MAX_FILE_BYTES, ByteArray, EncodedImage, too_large
from samebits.errors import DataError
from samebits.plain_file import MAX_MEMORY_BYTES, parse_json

Decoder = Callable[[Any], Any]

# 2**64 has as many.
_MAX_DIGITS = 20


def decode_rgb(content: bytes | Mapping[str, Any], name: str = "image") -> ByteArray:
    """Decode a JPEG, PNG, WebP, BMP, GIF, TIFF or PPM file, as an image viewer shows it.

    Args:
        content: The content of the file, or a mapping with it as `bytes`, as Hugging Face stores images in Parquet.
        name: Name of the image in errors.

    Returns:
        (H, W, 3) bytes, RGB.

    Raises:
        DataError: It is not an image, is damaged, or exceeds a limit.
    """
    return EncodedImage(name, encoded_content(content, name)).pixels()


def encoded_content(value: object, name: str) -> bytes:
    """Return the content of an image file from a column's value: the content, or a mapping with it as `bytes`.

    Raises:
        DataError: It is neither, or too large.
    """
    content = value
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if content is None and isinstance(value.get("path"), str):
            raise DataError(
                f"{name} has only the path of an image file",
                given=value["path"][:200],
                allowed="the content of the file",
                fix="Write the dataset with to_parquet, which stores the content; or set data.root to the images.",
            )
    if not isinstance(content, bytes):
        raise DataError(
            f"{name} is not the content of an image file",
            given=f"a {type(content).__name__}",
            allowed="bytes, or a mapping with bytes",
            fix="Store the image files themselves, not their paths.",
        )
    if len(content) > MAX_FILE_BYTES:
        raise too_large(name, len(content))
    return content


def decode_member(
    extension: str, content: bytes, name: str, decoders: Mapping[str, Decoder]
) -> Any:
    """Decode a file of a sample by its extension, such as `seg.png`, the user's `decoders` first; others stay bytes.

    Raises:
        DataError: The content does not have the form of the extension.
    """
    last = extension.rpartition(".")[2]
    decoder = decoders.get(extension) or decoders.get(last)
    if decoder is not None:
        try:
            return decoder(content)
        except Exception as error:
            error.add_note(f"while decoding {name}")
            raise
    if last in IMAGES:
        return decode_rgb(content, name)
    included = DECODERS.get(last)
    if included is None:
        return content
    try:
        return included(content)
    except Exception as error:  # NumPy's parser of headers raises any kind of exception
        raise DataError(
            f"{name} cannot be decoded as .{last}",
            cause=str(error) or type(error).__name__,
            fix=f'Write it again, or pass a function of your own: decode={{"{last}": function}}.',
        ) from error


def _integer(content: bytes) -> int:
    if len(content) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(content):,} characters")
    return int(content)


def _array(content: bytes) -> npt.NDArray[Any]:
    """Read an array of any shape in NumPy's format; one of Python objects, which only pickle could read, is refused."""
    file = io.BytesIO(content)
    # Memory that a damaged header claims is not touched before the content proves too short.
    values: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    if file.read(1):
        raise ValueError(
            f"the header claims {values.shape} of {values.dtype}, and more bytes follow"
        )
    return values


# The names of WebDataset; but its pyd, pickle, pth and similar, which are pickles, stay bytes here.
IMAGES = frozenset(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm"))
DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), lambda content: parse_json(content, MAX_MEMORY_BYTES)),
    "npy": _array,
}
