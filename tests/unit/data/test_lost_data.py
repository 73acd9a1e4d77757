"""Images that decode without an error and show something else: lost data, values of 12 bits, alpha that is unused."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from samebits.data.images import EncodedImage, decode_plain_jpeg, read_rgb
from samebits.errors import DataError


def photo(mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((600, 400), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.convert(mode).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


KINDS = {
    "plain": {}, "progressive": {"progressive": True}, "gray": {"mode": "L"}, "CMYK": {"mode": "CMYK"},
    "turned by EXIF": {"exif": turned()},
}  # fmt: skip
LOSSES = {
    "the rest is zeros": lambda content, half: content[:half] + bytes(len(content) - 2 - half) + content[-2:],
    "closed by a tool": lambda content, half: content[:half] + b"\xff\xd9",
    "a bad block": lambda content, half: content[:half] + b"\x55" * 400 + content[half + 400 :],
    "a marker in the pixels": lambda content, half: content[:half] + b"\xff\xd3" + content[half + 2 :],
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_jpeg_file_that_lost_data_is_refused(tmp_path: Path, kind: str, loss: str) -> None:
    content = photo(**KINDS[kind])  # type: ignore[arg-type]
    path = tmp_path / "a.jpg"
    path.write_bytes(content)
    whole = read_rgb(path)
    path.write_bytes(LOSSES[loss](content, len(content) * 2 // 3))
    with pytest.raises(DataError, match=r"image .*a\.jpg is damaged"):
        read_rgb(path)
    scaled = EncodedImage(path)
    if scaled.is_scalable:
        with pytest.raises(DataError, match="is damaged"):
            scaled.pixels(4)
    assert whole.any()


def test_padding_before_the_end_and_bytes_after_it_are_no_loss(tmp_path: Path) -> None:
    content = photo()
    whole = decode_plain_jpeg(content)
    for padded in (content[:-2] + b"\x55" * 7 + content[-2:], content + b"\0" * 100):
        assert np.array_equal(EncodedImage("a.jpg", padded).pixels(), whole)
    version = content.index(b"JFIF\0") + 5
    odd = content[:version] + b"\0\0" + content[version + 2 :]  # a warning of libjpeg, too
    assert np.array_equal(EncodedImage("a.jpg", odd).pixels(), whole)


@pytest.mark.parametrize("name", ["a.png", "a.tiff"])
@pytest.mark.parametrize("white", [255, 1023, 4095])
def test_values_of_fewer_bits_in_a_16_bit_file_are_refused(tmp_path: Path, name: str, white: int) -> None:
    gray = np.linspace(0, white, 64 * 96).reshape(64, 96).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / name)
    with pytest.raises(DataError, match="has 16 bits and would be nearly black") as caught:
        read_rgb(tmp_path / name)
    assert "12 bits" in caught.value.slots["cause"]
    Image.fromarray(gray * (65535 // white)).save(tmp_path / name)
    assert read_rgb(tmp_path / name).max() >= 254


def test_values_of_12_bits_in_a_16_bit_color_file_are_refused(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    color = np.random.default_rng(0).integers(0, 4096, (20, 30, 3), dtype=np.uint16)
    cv2.imwrite(str(tmp_path / "a.png"), color)
    with pytest.raises(DataError, match="nearly black"):
        read_rgb(tmp_path / "a.png")
    cv2.imwrite(str(tmp_path / "a.png"), color * 16)
    assert read_rgb(tmp_path / "a.png").max() > 250


def test_black_16_bit_images_and_dark_8_bit_images_are_read(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "black.png")
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(tmp_path / "dark.png")
    (tmp_path / "a.pgm").write_bytes(b"P5 2 1 4095\n" + struct.pack(">HH", 0, 4095))  # Pillow scales these itself
    assert [int(read_rgb(tmp_path / name).max()) for name in ("black.png", "dark.png", "a.pgm")] == [0, 9, 255]


@pytest.mark.parametrize("alpha", [0, 255, 128])
def test_alpha_of_a_bmp_file_that_is_zero_everywhere_is_unused(tmp_path: Path, alpha: int) -> None:
    bgra = np.full((4, 6, 4), (10, 100, 200, alpha), np.uint8)
    head = struct.pack("<IiiHHIIiiII", 124, 6, 4, 1, 32, 3, bgra.nbytes, 2835, 2835, 0, 0)
    head += struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000) + b"BGRs" + bytes(64)
    start = 14 + len(head)
    path = tmp_path / "a.bmp"
    path.write_bytes(b"BM" + struct.pack("<IHHI", start + bgra.nbytes, 0, 0, start) + head + bgra.tobytes())
    assert read_rgb(path)[0, 0].tolist() == ([227, 177, 132] if alpha == 128 else [200, 100, 10])
