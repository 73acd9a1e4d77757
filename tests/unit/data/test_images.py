"""Images: what is read, whatever their form, and those that are strange, lost or damaged."""

import gzip
import io
import os
import re
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from samebits.config.document import read
from samebits.data.coco import read_coco
from samebits.data.images import EncodedImage, read_rgb
from samebits.data.names import first_outside
from samebits.errors import ConfigError, DataError, SamebitsError
from samebits.provenance.fingerprint import commit_of
from samebits.recipes.classify.listing import read_csv
from samebits.recipes.mnist.data import SCALES, read_idx
from samebits.recipes.mnist.predict import read_image
from samebits.recipes.text.alphabet import read_alphabet
from samebits.recipes.text.config import Config as TextConfig
from samebits.recipes.text.config import DataConfig
from samebits.recipes.text.files import choose, find_alphabet
from samebits.recipes.text.labels import read_labels
from samebits.storage.pretrained import read_state


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


READERS: dict[str, Callable[[Path], object]] = {
    "a picture": read_rgb,
    "a digit's picture": lambda path: read_image(path, SCALES["mnist"]),
    "IDX": lambda path: read_idx(path, 3),
    "YAML": lambda path: read(path, "run.yaml"),
    "weights": read_state,
    "labels": lambda path: read_labels(path, DataConfig(train=str(path), eval=str(path))),
    "an alphabet": read_alphabet,
    "a list": read_csv,
    "annotations": read_coco,
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_or_a_device_is_refused_and_not_read_for_ever(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "fifo.jpg")
    for path in (tmp_path / "fifo.jpg", Path("/dev/zero")):
        with pytest.raises(SamebitsError, match=r"can't be read|not a regular file"):
            READERS[reader](path)


@pytest.mark.parametrize("form", ["EPS", "ICNS", "DDS", "AVIF", "TGA", "PCX", "JPEG2000"])
def test_a_picture_of_a_format_that_is_not_in_the_list_is_refused_whatever_its_name(tmp_path: Path, form: str) -> None:
    if form not in Image.SAVE and (Image.init(), form not in Image.SAVE)[1]:
        pytest.skip(f"this Pillow has no {form}")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.jpg", form)
    for ask in (read_rgb, lambda path: read_image(path, SCALES["mnist"])):
        with pytest.raises(DataError, match=r"a\.jpg is not an image") as error:
            ask(tmp_path / "a.jpg")
        assert "JPEG, PNG, WebP, BMP, GIF, TIFF or PPM" in str(error.value)


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + 3 * width)) for _ in range(height)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def test_a_small_png_file_of_very_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_png(10_000, 10_000)[:300_000])
    with pytest.raises(DataError, match="100,000,000 pixels, too many"):
        EncodedImage(tmp_path / "a.png")


def test_a_progressive_jpeg_file_of_very_many_scans_is_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    (tmp_path / "a.jpg").write_bytes(content[:last] + content[last:-2] * 200 + content[-2:])
    with pytest.raises(DataError, match="scans"):
        read_rgb(tmp_path / "a.jpg")


def test_gzip_is_unpacked_up_to_a_limit(tmp_path: Path) -> None:
    zeros = gzip.compress(bytes(1 << 24)) * 64  # a gigabyte
    for shape, said in (
        ((1, 28, 28), "is too long: 268,435,457 bytes"),
        ((1 << 20, 28, 28), "is truncated: 268,435,457 bytes"),
    ):
        head = gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, *shape))
        (tmp_path / "a.gz").write_bytes(head + zeros)
        with pytest.raises(DataError, match=said):
            read_idx(tmp_path / "a.gz", num_dims=3)


def test_yaml_whose_aliases_stand_for_very_much_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 10)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="stands for more than 50,000 values"):
        read(tmp_path / "a.yaml", "a.yaml")


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/secret.jpg", "a/../../secret.jpg"])
def test_names_in_lists_stay_in_the_folder_of_the_data(tmp_path: Path, name: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in (data / "a.jpg", tmp_path / "secret.jpg"):
        Image.new("RGB", (40, 32)).save(path)
    (data / "list.csv").write_text(f"a.jpg,x\n{name},y\n")
    with pytest.raises(DataError, match=re.escape(f"{name} is not in the folder")):
        read_csv(data / "list.csv")
    (data / "train.txt").write_text(f"a.jpg ab\n{name} cd\n")
    config = TextConfig.model_validate({"recipe": "text", "data": {"root": data, "eval": "train.txt"}})
    with pytest.raises(DataError, match=re.escape(f"{name} is not in the folder")):
        choose(config, find_alphabet(config.data), train=True)


def test_names_may_lead_about_inside_a_folder_that_the_user_gives(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "a..b.jpg")
    (data / "list.csv").write_text(f"../a..b.jpg,x\n{tmp_path}/a..b.jpg,y\n")
    with pytest.raises(DataError, match=r"data\.images"):
        read_csv(data / "list.csv")
    (data / "list.csv").write_text(f"a..b.jpg,x\n{tmp_path}/a..b.jpg,y\n")
    assert read_csv(data / "list.csv", images=tmp_path) == {"x": ["a..b.jpg"], "y": [f"{tmp_path}/a..b.jpg"]}
    assert first_outside(["/etc/x", "../y"], data, Path("/")) is None


def test_weights_that_unpack_to_very_much_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(30_000_000)}, tmp_path / "whole.pth")
    with (
        zipfile.ZipFile(tmp_path / "whole.pth") as whole,
        zipfile.ZipFile(tmp_path / "small.pth", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for member in whole.namelist():
            small.writestr(member, whole.read(member))
    with pytest.raises(SamebitsError, match=r"would\s+unpack\s+to\s+120,"):
        read_state(tmp_path / "small.pth")


def test_the_commit_is_read_without_running_what_the_repository_names(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    git = ["git", "-C", str(tmp_path / "repo"), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    (tmp_path / "repo" / "a.txt").write_text("a")
    subprocess.run([*git, "add", "a.txt"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    expected = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:12]
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    for setting in ("core.fsmonitor", "filter.x.clean", "alias.describe", "core.pager"):
        subprocess.run([*git, "config", setting, str(program)], check=True)
    (tmp_path / "repo" / ".gitattributes").write_text("* filter=x\n")
    (tmp_path / "repo" / "a.txt").write_text("b")
    inner = tmp_path / "repo" / "inner"
    inner.mkdir()
    assert commit_of(inner) == expected
    subprocess.run(
        ["git", "-C", str(tmp_path / "repo"), "-c", "core.fsmonitor=false", "pack-refs", "--all"], check=True
    )
    ran.unlink(missing_ok=True)  # git itself may have run it now
    assert commit_of(inner) == expected
    assert not ran.exists()
    assert commit_of(tmp_path) is None
    subprocess.run([*git, "worktree", "add", "-q", str(tmp_path / "beside")], check=True)
    assert commit_of(tmp_path / "beside") == expected
    with patch.dict("os.environ", PATH=str(tmp_path)):  # no git
        assert commit_of(inner) is None


def test_opencv_is_imported_in_one_place_where_its_threads_are_off(repo: Path) -> None:
    found = {
        path.relative_to(repo).as_posix()
        for path in (repo / "src" / "samebits").rglob("*.py")
        if re.search(r"^\s*(import|from) cv2\b|setNumThreads", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == {"src/samebits/data/opencv.py"}


def test_pictures_are_opened_in_one_place(repo: Path) -> None:
    found = {
        path.relative_to(repo).as_posix()
        for path in (repo / "src" / "samebits").rglob("*.py")
        if re.search(r"Image\.open\(|imread|imdecode|decode_jpeg\(|decode_image", path.read_text(encoding="utf-8"))
    }
    assert found == {
        "src/samebits/data/images.py",
        "src/samebits/run_views/page/sections.py",  # a run's own PNG files, made smaller
        "src/samebits/report/pictures.py",  # the comment of a picture that a run has drawn, of two formats
    }
