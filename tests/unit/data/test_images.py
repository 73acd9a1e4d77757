"""Image files of any kind are read as an image viewer shows them."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from samebits.data.images import EncodedImage, read_rgb
from samebits.errors import DataError


def scene(width: int = 96, height: int = 64) -> Image.Image:
    """Red at the top left, green at the top right, blue at the bottom left, light at the bottom right; smooth."""
    corners = np.array([[[230, 20, 20], [20, 200, 30]], [[20, 30, 220], [240, 240, 230]]], dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BILINEAR)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first.astype(float) - second.astype(float)).mean())


@pytest.mark.parametrize(
    ("mode", "name", "largest"),
    [
        ("RGB", "a.png", 0), ("RGB", "a.bmp", 0), ("RGB", "a.jpg", 2), ("RGB", "a.webp", 5), ("RGB", "a.tiff", 0),
        ("P", "a.png", 20), ("P", "a.gif", 20), ("CMYK", "a.jpg", 3), ("CMYK", "a.tiff", 2), ("RGBA", "a.png", 0),
        ("YCbCr", "a.jpg", 2),
    ],
)  # fmt: skip
def test_colored_pictures_look_alike_in_any_form(tmp_path: Path, mode: str, name: str, largest: float) -> None:
    scene().convert(mode).save(tmp_path / name)
    pixels = read_rgb(tmp_path / name)
    assert pixels.shape == (64, 96, 3)
    assert pixels.dtype == np.uint8
    assert distance(pixels, np.asarray(scene())) <= largest


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_a_gray_picture_has_three_equal_colors(tmp_path: Path, name: str) -> None:
    scene().convert("L").save(tmp_path / name)
    pixels = read_rgb(tmp_path / name)
    assert distance(pixels, np.asarray(scene().convert("L"))[:, :, None].repeat(3, axis=2)) < 2


def test_16_bits_are_brought_to_8_and_not_cut_off(tmp_path: Path) -> None:
    gray = np.linspace(0, 65535, 64 * 96).reshape(64, 96).astype(np.uint16)
    Image.fromarray(gray).save(tmp_path / "a.png")
    assert distance(read_rgb(tmp_path / "a.png")[:, :, 0], gray / 257) < 1


def test_what_is_transparent_is_white(tmp_path: Path) -> None:
    image = scene().convert("RGBA")
    image.paste((0, 0, 0, 0), (0, 0, 48, 64))
    image.save(tmp_path / "a.png")
    pixels = read_rgb(tmp_path / "a.png")
    assert (pixels[:, :48] == 255).all()
    assert (pixels[:, 48:] == np.asarray(scene())[:, 48:]).all()


def test_of_an_animation_the_first_picture_is_taken(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "blue", "green")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert (read_rgb(tmp_path / "a.gif") == (255, 0, 0)).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_an_image_is_upright_by_its_exif_orientation(tmp_path: Path, orientation: int, name: str) -> None:
    # How the camera must have stored it for a viewer to show the scene.
    turned = {
        1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
    }[orientation]  # fmt: skip
    stored = scene() if turned is None else scene().transpose(turned)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / name, exif=exif)
    picture = EncodedImage(tmp_path / name)
    assert picture.size == (96, 64)
    assert distance(picture.pixels(), np.asarray(scene())) < 2
    if picture.is_scalable:
        smaller = EncodedImage(tmp_path / name).pixels(2)
        assert distance(smaller[:10], np.asarray(scene().resize((48, 32), Image.Resampling.BOX))[:10]) < 4


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # Pillow warns; the test expects it
def test_a_broken_exif_block_does_not_lose_the_picture(tmp_path: Path) -> None:
    scene().save(tmp_path / "a.jpg", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    assert distance(read_rgb(tmp_path / "a.jpg"), np.asarray(scene())) < 2


def photo(path: Path, width: int, height: int, **options: object) -> None:
    """A JPEG file with detail all over, so that it is long."""
    noise = np.random.default_rng(width).integers(0, 256, (height // 2, width // 2, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR).save(path, quality=90, **options)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"exif": Image.Exif().tobytes()}])
def test_plain_jpeg_files_decode_to_pillows_bits(tmp_path: Path, options: dict[str, object]) -> None:
    photo(tmp_path / "a.jpg", 333, 217, **options)
    assert np.array_equal(read_rgb(tmp_path / "a.jpg"), np.asarray(Image.open(tmp_path / "a.jpg")))


@pytest.mark.parametrize("head", [b"", b"\xff\xe1\x00\x08Exif\x00\x00"], ids=["plain", "exif"])
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_decoding_gives_pillows_bits_however_colors_are_stored(tmp_path: Path, subsampling: str, head: bytes) -> None:
    noise = np.random.default_rng(3).integers(0, 256, (99, 60, 3), dtype=np.uint8)
    content = simplejpeg.encode_jpeg(noise, quality=95, colorsubsampling=subsampling)
    (tmp_path / "a.jpg").write_bytes(content[:2] + head + content[2:])
    assert np.array_equal(read_rgb(tmp_path / "a.jpg"), np.asarray(Image.open(tmp_path / "a.jpg")))


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
def test_a_scale_divides_the_sides(tmp_path: Path, scale: int) -> None:
    photo(tmp_path / "a.jpg", 333, 217)
    assert EncodedImage(tmp_path / "a.jpg").pixels(scale).shape == (-(-217 // scale), -(-333 // scale), 3)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("name", "options"), [("a.jpg", {}), ("b.jpg", {"progressive": True}), ("c.png", {})])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, share: float, name: str, options: dict[str, object]) -> None:
    path = tmp_path / name
    photo(path, 200, 150, **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    for ask in ({}, {"scale": 2}):
        with pytest.raises(DataError, match=name):
            EncodedImage(path).pixels(**ask)


@pytest.mark.parametrize("content", [b"", b"no picture at all", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
def test_what_is_no_picture_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "odd.jpg"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"odd\.jpg"):
        read_rgb(path)


def test_a_damaged_png_is_named(tmp_path: Path) -> None:
    photo(tmp_path / "a.png", 60, 40)
    content = bytearray((tmp_path / "a.png").read_bytes())
    content[60:160] = b"\xff" * 100
    (tmp_path / "a.png").write_bytes(bytes(content))
    with pytest.raises(DataError, match="damaged"):
        read_rgb(tmp_path / "a.png")


def test_a_file_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jpg", tmp_path):
        with pytest.raises(DataError, match="can't be read"):
            read_rgb(path)


def test_a_decompression_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(png)
    small = io.BytesIO()
    scene().save(small, "JPEG")
    jpeg = small.getvalue()
    place = jpeg.index(b"\xff\xc0") + 5
    (tmp_path / "bomb.jpg").write_bytes(jpeg[:place] + struct.pack(">HH", 60_000, 60_000) + jpeg[place + 4 :])
    for name in ("bomb.png", "bomb.jpg"):
        with pytest.raises(DataError, match=r"178,956,970 pixels"):
            EncodedImage(tmp_path / name)
