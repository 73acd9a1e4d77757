"""An image of a line is the same in a file and in an LMDB dataset."""

import io
from pathlib import Path

import lmdb
import numpy as np
import pytest
from PIL import Image

from samebits.data.images import EncodedImage
from samebits.errors import DataError
from samebits.recipes.text.images import gray, open_packed

PIXELS = np.random.default_rng(5).integers(0, 256, (20, 50), dtype=np.uint8)
LINE = Image.fromarray(PIXELS)


def packed(folder: Path, content: bytes) -> Path:
    with lmdb.open(str(folder), map_size=1 << 20) as env, env.begin(write=True) as transaction:
        transaction.put(b"image-000000001", content)
    return folder


def file_of(image: Image.Image, form: str, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, form, exif=exif)
    return file.getvalue()


def transparent() -> Image.Image:
    """Black everywhere: what can be seen of it is in its opacity."""
    image = Image.new("RGBA", LINE.size, "black")
    image.putalpha(LINE)
    return image


FILES = {
    "gray": file_of(LINE, "PNG"),
    "colors": file_of(Image.merge("RGB", [LINE, LINE.rotate(180), LINE]), "JPEG"),
    "transparent": file_of(transparent(), "PNG"),
    "16 bits": file_of(Image.fromarray(PIXELS.astype(np.uint16) * 257), "PNG"),
    "palette": file_of(LINE.convert("RGB").quantize(16), "PNG"),
    "CMYK": file_of(LINE.convert("CMYK"), "JPEG"),
    "upside down": file_of(LINE, "JPEG", orientation=3),
    "on its side": file_of(LINE, "JPEG", orientation=6),
    "on its side, PNG": file_of(LINE, "PNG", orientation=8),
    "turned in no known way": file_of(LINE, "JPEG", orientation=77),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_packed_picture_is_seen_as_the_same_file_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "line").write_bytes(FILES[kind])
    folder = packed(tmp_path / "set", FILES[kind])
    here, there = EncodedImage(tmp_path / "line"), open_packed(folder, 1)
    picture = gray(there)
    assert picture.std() > 10
    assert np.array_equal(picture, gray(here))
    assert here.size == there.size == picture.shape[::-1]


@pytest.mark.parametrize("kind", ["gray", "colors"])
def test_a_damaged_packed_picture_is_named(tmp_path: Path, kind: str) -> None:
    folder = packed(tmp_path / "set", FILES[kind][:-300])
    with pytest.raises(DataError, match=r"image-000000001 of .*set is damaged"):
        gray(open_packed(folder, 1))
