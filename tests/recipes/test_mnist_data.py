import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from samebits.data.keyed import keys
from samebits.errors import DataError
from samebits.recipes.mnist.config import DataConfig
from samebits.recipes.mnist.data import SCALES, DigitImages, open_images, read_digits, read_mnist


def _idx(content: np.ndarray) -> bytes:
    return bytes((0, 0, 8, content.ndim)) + struct.pack(f">{content.ndim}I", *content.shape) + content.tobytes()


def _write_mnist(folder: Path) -> DataConfig:
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        images = np.arange(5 * 784, dtype=np.uint8).reshape(5, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(_idx(np.arange(5, dtype=np.uint8)))
    return DataConfig(root=folder, download=False)


def _fault(config: DataConfig) -> str:
    with pytest.raises(DataError) as caught:
        read_mnist(config, train=True)
    return str(caught.value)


def test_mnist_is_read_as_it_was_published(mnist_folder: Path, repo: Path) -> None:
    path = repo.parent / "shared" / "parity" / "mnist.json"
    if not path.exists():
        pytest.skip("the published figures, ../shared/parity/mnist.json, are not there")
    published = json.loads(path.read_text())
    for part, train in (("train", True), ("t10k", False)):
        images, labels = read_mnist(DataConfig(root=mnist_folder, download=False), train=train)
        of_images, of_labels = published[f"{part}-images-idx3-ubyte.gz"], published[f"{part}-labels-idx1-ubyte.gz"]
        assert list(images.shape) == of_images["shape"]
        assert int(images.sum(dtype=np.int64)) == of_images["sum"]
        assert images.mean() / 255 == pytest.approx(of_images["mean"], rel=1e-9)
        for index, row in of_images["centre_row"].items():
            assert images[int(index), 14].tolist() == row
        assert np.bincount(labels).tolist() == of_labels["counts"]
        assert labels[:20].tolist() == of_labels["first20"]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("inside", ["", "MNIST/raw"])
def test_mnist_is_found_plain_or_packed_and_where_torchvision_puts_it(tmp_path: Path, ending: str, inside: str) -> None:
    _write_mnist(tmp_path / inside)
    pack = {"": bytes, ".gz": gzip.compress}[ending]
    for path in list((tmp_path / inside).iterdir()):
        content = path.read_bytes()
        path.unlink()
        path.with_name(path.name + ending).write_bytes(pack(content))
    images, labels = read_mnist(DataConfig(root=tmp_path, download=False), train=False)
    assert images.shape == (5, 28, 28)
    assert labels.tolist() == [0, 1, 2, 3, 4]


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
CUT = {
    f"cut off at {size}": (IMAGES, lambda content, size=size: content[:size], "{path} is truncated")
    for size in (2, 4, 10, 16, 500)
}
FAULTS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    **CUT,
    "empty": (IMAGES, lambda content: b"", "{path} is truncated: 0 bytes"),
    "too long": (IMAGES, lambda content: content + b"x", "is too long"),
    "wrong magic": (IMAGES, lambda content: b"\x89PNG and so on, for a while", "first bytes 89 50 4e 47"),
    "labels in place of images": (IMAGES, lambda content: _idx(np.zeros(5, np.uint8)), "images and labels are swapped"),
    "more images than labels": (
        IMAGES,
        lambda content: _idx(np.zeros((6, 28, 28), np.uint8)),
        "6 images, but 5 labels",
    ),
    "another size": (IMAGES, lambda content: _idx(np.zeros((5, 32, 30), np.uint8)), "images of 30x32"),
    "no digit": (LABELS, lambda content: _idx(np.array([1, 2, 11, 3, 4], np.uint8)), "label 11 at index 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_what_it_claims_is_named(tmp_path: Path, fault: str) -> None:
    name, change, said = FAULTS[fault]
    config, path = _write_mnist(tmp_path), tmp_path / name
    path.write_bytes(change(path.read_bytes()))
    assert said.format(path=path) in _fault(config)


def test_a_cut_off_packed_file_is_named(tmp_path: Path) -> None:
    config, path = _write_mnist(tmp_path), tmp_path / IMAGES
    packed = path.with_name(IMAGES + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:-20])
    path.unlink()
    assert f"{packed} can't be unpacked" in _fault(config)


def test_a_folder_without_the_files_is_reported(tmp_path: Path) -> None:
    text = _fault(DataConfig(root=tmp_path, download=False))
    assert f"{tmp_path} contains no {IMAGES}" in text
    assert "data.root" in text
    (tmp_path / "file").write_text("")
    assert "file can't be read: Not a directory" in _fault(DataConfig(root=tmp_path / "file", download=False))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert f"the data folder {tmp_path}/loop can't be read" in _fault(DataConfig(root=tmp_path / "loop"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
def test_a_folder_that_may_not_be_entered_is_reported(tmp_path: Path) -> None:
    config = _write_mnist(tmp_path / "closed")
    (tmp_path / "closed").chmod(0)
    try:
        assert "can't be read: Permission denied" in _fault(config)
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_digits_hold_out_a_fifth_of_each_class() -> None:
    images, labels = read_digits(train=True)
    held_images, held_labels = read_digits(train=False)
    assert (len(images), len(held_images)) == (1437, 360)
    counts, held_counts = np.bincount(labels), np.bincount(held_labels)
    assert np.abs(held_counts - (counts + held_counts) / 5).max() <= 1
    seen = {image.tobytes() for image in images}
    assert not any(image.tobytes() in seen for image in held_images)


def test_normalized_pictures_have_mean_0_and_deviation_1(mnist_folder: Path) -> None:
    for config in (DataConfig(name="digits"), DataConfig(root=mnist_folder, num_train=20_000)):
        samples = open_images(config, train=True)
        everything = np.arange(len(samples))
        inputs = samples.batch(everything, everything.astype(np.uint64)).inputs
        assert abs(inputs.mean().item()) < 0.01
        assert abs(inputs.std().item() - 1) < 0.01


def test_a_shift_follows_from_the_key_alone() -> None:
    images, labels = read_digits(train=True)
    samples = DigitImages(images, labels, SCALES["digits"], shift_px=2)
    indices = np.arange(100)
    whole = samples.batch(indices, keys(0, 1, indices)).inputs
    order = np.random.default_rng(0).permutation(100)
    for part in np.array_split(order, 7):
        assert torch.equal(samples.batch(part, keys(0, 1, part)).inputs, whole[part])
    assert not torch.equal(samples.batch(indices, keys(0, 2, indices)).inputs, whole)


def test_a_shift_moves_a_picture_by_every_whole_number_of_pixels() -> None:
    image = np.zeros((1, 8, 8), np.uint8)
    image[0, 4, 4] = 16
    samples = DigitImages(image, np.zeros(1, np.uint8), SCALES["digits"], shift_px=1)
    indices = np.zeros(500, np.int64)
    inputs = samples.batch(indices, keys(0, 0, np.arange(500))).inputs[:, 0]
    assert set(map(tuple, np.argwhere(inputs.numpy() > 0)[:, 1:].tolist())) == {
        (row, column) for row in (3, 4, 5) for column in (3, 4, 5)
    }


def test_validation_images_are_never_shifted() -> None:
    samples = open_images(DataConfig(name="digits", shift_px=2), train=False)
    indices = np.arange(360)
    first, second = (samples.batch(indices, keys(0, epoch, indices)).inputs for epoch in (0, 1))
    assert torch.equal(first, second)


def test_fewer_pictures_can_be_asked_for() -> None:
    config = DataConfig(name="digits", num_train=101, num_eval=7)
    assert len(open_images(config, train=True)) == 101
    assert len(open_images(config, train=False)) == 7
