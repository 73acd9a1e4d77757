"""Files of unknown origin run nothing, take little memory, end, and stay in the data's folder."""

from __future__ import annotations

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

import pytest
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
