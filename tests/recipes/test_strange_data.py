"""Data sets of strangers: what would take all memory, not end, or end the process is refused with a text."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samebits.data.crop import center_square, resized
from samebits.data.images import EncodedImage
from samebits.errors import DataError
from samebits.recipes.classify.config import DataConfig
from samebits.recipes.classify.data import center_crop, preprocess
from samebits.recipes.mnist.data import read_idx
from samebits.recipes.pose.infer import read_image
from samebits.recipes.text import labels as packed_lmdb
from samebits.recipes.text.alphabet import MAX_CHARACTERS, Alphabet
from samebits.recipes.text.config import DataConfig as TextData
from samebits.recipes.text.labels import read_labels


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes((width + 1) * height))) + chunk(b"IEND", b"")
    )


def _encoded(form: str) -> bytes:
    file = io.BytesIO()
    Image.new("P" if form == "GIF" else "RGB", (40, 30)).save(file, form)
    return file.getvalue()


@pytest.mark.parametrize(("width", "height"), [(1, 1_000_000), (1_000_000, 1)])
def test_a_picture_of_one_pixel_by_a_million_is_classified_and_not_looked_at_for_people(
    tmp_path: Path, width: int, height: int
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(_png(width, height))
    # All of it, with the shorter side brought to 256, would take 196 GB.
    assert preprocess(path, DataConfig()).shape == (3, 224, 224)
    with pytest.raises(DataError, match="too long for pose estimation"):
        read_image(path)


@pytest.mark.parametrize("size", [(640, 40), (500, 333)])
def test_of_a_picture_up_to_sixteen_times_as_long_as_wide_all_is_resized(tmp_path: Path, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    whole = resized(pixels, None, 256, int(256 * size[0] / size[1]))
    cropped = center_crop(EncodedImage(tmp_path / "a.png"), DataConfig())
    assert torch.equal(cropped, center_square(whole, 224))


@pytest.mark.parametrize(
    ("content", "what"), [(b"a.jpg 1" + b" 1" * 600_000, "longer than"), (b"\n" * 10_000_001, "lines")]
)
def test_label_files_of_gigantic_lines_or_very_many_are_refused(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(DataError, match=what):
        read_labels(tmp_path / "labels.txt", TextData(train="labels.txt", val_fraction=0.5), None)


def test_an_alphabet_of_all_of_unicode_is_refused() -> None:
    with pytest.raises(DataError, match="the alphabet has"):
        Alphabet("".join(map(chr, range(0x10000, 0x10000 + MAX_CHARACTERS + 1))))


def test_a_gzip_file_may_have_several_members(tmp_path: Path) -> None:
    labels = struct.pack(">4BI", 0, 0, 8, 1, 3) + b"abc"
    (tmp_path / "two.gz").write_bytes(gzip.compress(labels[:5]) + gzip.compress(labels[5:]))
    assert bytes(read_idx(tmp_path / "two.gz", 1)) == b"abc"


def _set(folder: Path, num: int) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(folder), map_size=1 << 27) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"num-samples", b"%d" % num)
        for number in range(1, num + 1):
            transaction.put(b"image-%09d" % number, bytes(5000 if number % 9 == 0 else 40))
            transaction.put(b"label-%09d" % number, b"text %d" % number)
    return folder / "data.mdb"


def _read_all(folder: Path) -> int:
    try:
        texts = packed_lmdb.read_texts(folder)
        return sum(len(packed_lmdb.read_image(folder, number)) for number in range(1, len(texts) + 1))
    finally:
        packed_lmdb._close_all()


def test_a_truncated_lmdb_file_is_refused(tmp_path: Path) -> None:
    path = _set(tmp_path, 3000)
    assert _read_all(tmp_path) > 0
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"bytes, .* needed"):
        _read_all(tmp_path)
