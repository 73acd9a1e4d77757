"""Images of digits, held in memory: MNIST, and the UCI digits that come with scikit-learn.

Legend: N images, H and W their height and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.data.fetch import Download, fetch
from lockstep.data.keyed import IntArray, KeyArray, uniform
from lockstep.data.samples import Batch
from lockstep.errors import DataError
from lockstep.recipes.mnist.config import DataConfig
from lockstep.recipes.mnist.idx import ENDINGS, ByteArray, read_idx


@dataclass(frozen=True)
class Scale:
    """How bytes become the numbers that the model sees: (byte / white - mean) / std.

    Attributes:
        size_px: Height and width of an image.
        box_px: Height and width within which the ink of a digit lies.
        white: The byte that stands for full ink.
        mean: Of all training pixels, with full ink as 1.
        std: The same pixels' standard deviation.
    """

    size_px: int
    box_px: int
    white: int
    mean: float
    std: float

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes of any shape -> float32 of the same shape and layout in memory."""
        return pixels.to(torch.float32).sub_(self.white * self.mean).mul_(1 / (self.white * self.std))


# The UCI digits count ink in cells of 4x4 pixels, so their white is 16.
SCALES = {
    "mnist": Scale(size_px=28, box_px=20, white=255, mean=0.1307, std=0.3081),
    "digits": Scale(size_px=8, box_px=8, white=16, mean=0.3053, std=0.3760),
}
TITLES = {"mnist": "MNIST", "digits": "UCI digits (scikit-learn)"}

MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


class DigitImages:
    """Grey images with their labels, gathered a whole batch at a time.

    Args:
        images: (N, H, W) bytes, white ink on black.
        labels: (N,) bytes, the class of each image.
        scale: How bytes become numbers.
        shift_px: Each image moves by a random whole number of pixels in -shift_px ... shift_px, both ways; what
            comes in at the edge is black.
    """

    def __init__(self, images: ByteArray, labels: ByteArray, scale: Scale, *, shift_px: int = 0) -> None:
        border = (shift_px, shift_px)
        height, width = images.shape[1:]
        padded = torch.from_numpy(np.pad(images, ((0, 0), border, border)))
        # (N, 2 * shift + 1, 2 * shift + 1, H, W): every shift of every image, as a view that copies nothing.
        self._windows = padded.unfold(1, height, 1).unfold(2, width, 1)
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self._scale = scale
        self._shift_px = shift_px

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Gather, shift and normalise: inputs (N, 1, H, W) float32, targets (N,) int64."""
        places = torch.from_numpy(indices)
        if self._shift_px:
            num_places = 2 * self._shift_px + 1
            down, right = (torch.from_numpy((uniform(keys, axis) * num_places).astype(np.int64)) for axis in (0, 1))
            pixels = self._windows[places, down, right]
        else:
            pixels = self._windows[:, 0, 0].index_select(0, places)
        images = self._scale.normalise(pixels)
        return Batch(images.unsqueeze(1), self._labels.index_select(0, places), places)


def open_images(config: DataConfig, *, train: bool) -> DigitImages:
    """Open the training or the validation images.

    Raises:
        DataError: MNIST's files are missing and cannot be fetched, or are not what they claim to be.
    """
    images, labels = read_digits(train=train) if config.name == "digits" else read_mnist(config, train=train)
    limit = config.num_train if train else config.num_eval
    return DigitImages(
        images[:limit],
        labels[:limit],
        SCALES[config.name],
        shift_px=config.shift_px if train else 0,
    )


def read_digits(*, train: bool) -> tuple[ByteArray, ByteArray]:
    """The UCI digits: (1437, 8, 8) and (1437,) to train with, (360, 8, 8) and (360,) held out.

    Every fifth image of the set sorted by class is held out, so each class is, to within one image, held out by a
    fifth. Both parts keep the order of the set.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    held_out = np.zeros(len(bunch.target), dtype=bool)
    held_out[np.argsort(bunch.target, kind="stable")[::5]] = True
    chosen = ~held_out if train else held_out
    return bunch.images[chosen].astype(np.uint8), bunch.target[chosen].astype(np.uint8)


def read_mnist(config: DataConfig, *, train: bool) -> tuple[ByteArray, ByteArray]:
    """MNIST: (60000, 28, 28) and (60000,) to train with, (10000, 28, 28) and (10000,) held out.

    Raises:
        DataError: A file is missing and cannot be fetched, or damaged; images and labels do not fit together.
    """
    part = "train" if train else "t10k"
    images_path = _find(config, f"{part}-images-idx3-ubyte")
    labels_path = _find(config, f"{part}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, num_dims=3), read_idx(labels_path, num_dims=1)
    if len(images) != len(labels):
        raise DataError(
            f"{len(images):,} images, but {len(labels):,} labels",
            pictures=images_path,
            labels=labels_path,
            fix="take both files from one source",
        )
    if len(images) == 0:
        raise DataError(f"{images_path} holds no images")
    if images.shape[1:] != (28, 28):
        height, width = images.shape[1:]
        raise DataError(f"{images_path} holds images of {width}x{height}", allowed="28x28")
    if labels.max() > 9:
        place = int(np.argmax(labels > 9))
        raise DataError(f"{labels_path} holds label {labels[place]} at place {place}", allowed="0 to 9")
    return images, labels


def _find(config: DataConfig, name: str) -> Path:
    """The file of this name in the data folder, in whichever form; fetched where there is none."""
    root = config.root.expanduser()
    folders = (root, root / "MNIST" / "raw")
    for folder in folders:
        for ending in ENDINGS:
            path = folder / (name + ending)
            try:
                # stat, not exists: a folder that may not be entered is not the same as a file that is not there.
                path.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise DataError(
                    f"the data folder {folder} cannot be read: {error.strerror}",
                    given=f"data.root={config.root}",
                    fix="give yourself the right to read and enter it, or another data.root",
                ) from error
            return path
    if root.exists() and not root.is_dir():
        raise DataError(f"the data folder {root} is a file", given=f"data.root={config.root}")
    if not config.download:
        raise DataError(
            f"{root} holds no {name}",
            given=f"data.root={config.root} and data.download=false",
            allowed=f"{name}, {name}.gz or {name}.xz there or in {folders[1]}",
            fix="give the folder of MNIST's four files as data.root, or data.download=true",
        )
    download = Download(urls=tuple(f"{mirror}{name}.gz" for mirror in MIRRORS), path=root / f"{name}.gz", md5=MD5[name])
    fetch(download, otherwise="get MNIST's four IDX files yourself and give their folder: data.root=DIR")
    return download.path
