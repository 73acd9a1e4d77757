"""Images of digits, held in memory: MNIST, and the UCI digits, which come with Samebits.

Legend: N images, H and W their height and width.
"""

import gzip
import io
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.data.fetch import fetch
from samebits.data.keyed import IntArray, KeyArray, uniform
from samebits.data.samples import Batch, Samples
from samebits.errors import DataError
from samebits.recipes.listing import read_list
from samebits.recipes.mnist.config import DataConfig

# Read IDX files, the format of MNIST: plain or .gz.
#
# A file starts with two zero bytes, one byte for the type of number (8: unsigned bytes, the only one here), one for the
# number of dimensions, and the size of each dimension as 4 bytes, most significant first. Source: the format's
# description on MNIST's own page (LeCun, Cortes and Burges).


ByteArray = npt.NDArray[np.uint8]
ENDINGS = ("", ".gz")
# More than the largest published set of digits (EMNIST's, 188 MB). A megabyte of gzip can unpack to a gigabyte.
MAX_BYTES = 1 << 28
_AGAIN = "Delete the file and download it again."


def read_idx(path: Path, num_dims: int) -> ByteArray:
    """Read one IDX file of unsigned bytes.

    Args:
        num_dims: Required number of dimensions: 3 for images, 1 for labels.

    Returns:
        (N, H, W) images or (N,) labels, uint8.

    Raises:
        DataError: The file can't be read or unpacked, is empty or cut off, or is not such an IDX file.
    """
    head_bytes = 4 + 4 * num_dims
    content = _unpacked(path, read_list(path, MAX_BYTES, "Check the path and its permissions."))
    expected = (
        f"an IDX file of unsigned bytes with {num_dims} dimension{'s' if num_dims > 1 else ''}"
    )
    magic = bytes((0, 0, 8, num_dims))
    if len(content) >= 4 and content[:4] != magic:
        given = " ".join(f"{byte:02x}" for byte in content[:4])
        is_swapped = content[:3] == magic[:3]
        raise DataError(
            f"{path} is not {expected}",
            given=f"first bytes {given}",
            allowed=magic.hex(" "),
            cause="images and labels are swapped" if is_swapped else None,
            fix="Rename the files." if is_swapped else _AGAIN,
        )
    if len(content) < head_bytes:
        raise DataError(
            f"{path} is truncated: {len(content)} bytes, but the header alone has {head_bytes}",
            allowed=expected,
            fix=_AGAIN,
        )
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    size = head_bytes + math.prod(shape)
    if len(content) != size:
        wanted = " x ".join(f"{length:,}" for length in shape)
        raise DataError(
            f"{path} is {'truncated' if len(content) < size else 'too long'}: {len(content):,} bytes",
            allowed=f"{size:,} bytes, from the shape {wanted} in its header",
            fix=_AGAIN,
        )
    return np.frombuffer(content, np.uint8, offset=head_bytes).reshape(shape)


def _unpacked(path: Path, packed: bytes) -> bytes:
    """Decompress a file, up to the limit and one byte more, which shows that it is too long."""
    try:
        if path.suffix == ".gz":
            return gzip.GzipFile(fileobj=io.BytesIO(packed)).read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} can't be unpacked: {error}",
            given=f"{len(packed):,} bytes",
            cause="the file is truncated or damaged",
            fix=_AGAIN,
        ) from error
    return packed


@dataclass(frozen=True)
class Scale:
    """The size and normalization of a dataset: (byte / white - mean) / std."""

    size_px: int  #: Height and width of an image.
    box_px: int  #: Height and width of the box that the ink of a digit fills.
    white: int  #: The byte value of full ink.
    mean: float  #: Mean of all training pixels; full ink is 1.
    std: float  #: Standard deviation of all training pixels.

    def normalize(self, pixels: Tensor) -> Tensor:
        """Normalize bytes of any shape to float32 of the same shape and memory format."""
        return (
            pixels.to(torch.float32).sub_(self.white * self.mean).mul_(1 / (self.white * self.std))
        )


# The UCI digits count ink in cells of 4x4 pixels, so their white is 16.
SCALES = {
    "mnist": Scale(size_px=28, box_px=20, white=255, mean=0.1307, std=0.3081),
    "digits": Scale(size_px=8, box_px=8, white=16, mean=0.3053, std=0.3760),
}
DIGITS = Path(__file__).parent / "digits"  # its README.txt has source and license
TITLES = {"mnist": "MNIST", "digits": "UCI digits"}

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


class DigitImages(Samples):
    """Gray images with labels, in memory. A batch is gathered, shifted and normalized at once.

    Args:
        images: (N, H, W) bytes, white ink on black.
        labels: (N,) bytes, the class of each image.
        shift_px: Maximum random shift in x and y, in whole pixels. New pixels at the border are black.
    """

    def __init__(
        self, images: ByteArray, labels: ByteArray, scale: Scale, *, shift_px: int = 0
    ) -> None:
        border = (shift_px, shift_px)
        height, width = images.shape[1:]
        padded = torch.from_numpy(np.pad(images, ((0, 0), border, border)))
        # (N, 2 * shift + 1, 2 * shift + 1, H, W): every shift of every image, as a view without a copy.
        self._windows = padded.unfold(1, height, 1).unfold(2, width, 1)
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self._scale = scale
        self._shift_px = shift_px

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Load a batch: inputs (N, 1, H, W) float32, targets (N,) int64."""
        index = torch.from_numpy(indices)
        if self._shift_px:
            num_shifts = 2 * self._shift_px + 1
            down, right = (
                torch.from_numpy((uniform(keys, axis) * num_shifts).astype(np.int64))
                for axis in (0, 1)
            )
            pixels = self._windows[index, down, right]
        else:
            pixels = self._windows[:, 0, 0].index_select(0, index)
        images = self._scale.normalize(pixels)
        return Batch(images.unsqueeze(1), self._labels.index_select(0, index), index)


def open_images(config: DataConfig, *, train: bool) -> DigitImages:
    """Open the training or the validation images.

    Raises:
        DataError: The files of MNIST are missing and cannot be downloaded, or are damaged.
    """
    images, labels = (
        read_digits(train=train) if config.name == "digits" else read_mnist(config, train=train)
    )
    limit = config.num_train if train else config.num_eval
    return DigitImages(
        images[:limit],
        labels[:limit],
        SCALES[config.name],
        shift_px=config.shift_px if train else 0,
    )


def read_digits(*, train: bool) -> tuple[ByteArray, ByteArray]:
    """Read the UCI digits, in the order of scikit-learn's `load_digits`.

    The validation split is every fifth image of the dataset sorted by class, so it has a fifth of each class, to
    within one image. Both splits keep the order of the dataset.

    Returns:
        Images (1437, 8, 8) and labels (1437,) for training, or (360, 8, 8) and (360,) for validation.
    """
    images = read_idx(DIGITS / "digits-images-idx3-ubyte.gz", num_dims=3)
    labels = read_idx(DIGITS / "digits-labels-idx1-ubyte.gz", num_dims=1)
    is_validation = np.zeros(len(labels), dtype=bool)
    # Stable, so that every machine chooses the same images.
    is_validation[np.argsort(labels, kind="stable")[::5]] = True
    selected = ~is_validation if train else is_validation
    return images[selected], labels[selected]


def read_mnist(config: DataConfig, *, train: bool) -> tuple[ByteArray, ByteArray]:
    """Read MNIST from its IDX files; download them if they are missing.

    Returns:
        Images (60000, 28, 28) and labels (60000,) for training, or (10000, 28, 28) and (10000,) for validation.

    Raises:
        DataError: A file is missing and cannot be downloaded, or is damaged; images and labels do not match.
    """
    part = "train" if train else "t10k"
    images_path = _find(config, f"{part}-images-idx3-ubyte")
    labels_path = _find(config, f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, num_dims=3)
    labels = read_idx(labels_path, num_dims=1)
    if len(images) != len(labels):
        raise DataError(
            f"MNIST has {len(images):,} images, but {len(labels):,} labels",
            where=f"{images_path}\n{labels_path}",
            fix="Take both files from one source.",
        )
    if len(images) == 0:
        raise DataError(f"{images_path} contains no images", fix=_AGAIN)
    if images.shape[1:] != (28, 28):
        height, width = images.shape[1:]
        raise DataError(
            f"{images_path} contains images of {width}x{height}", allowed="28x28", fix=_AGAIN
        )
    if labels.max() > 9:
        index = int(np.argmax(labels > 9))
        raise DataError(
            f"{labels_path} contains label {labels[index]} at index {index}",
            allowed="0 to 9",
            fix=_AGAIN,
        )
    return images, labels


def _find(config: DataConfig, name: str) -> Path:
    """Find a file in the data folder, plain or packed; download it if there is none."""
    root = config.root.expanduser()
    folders = (root, root / "MNIST" / "raw")
    # Some sites pack the files with a dot in their names.
    wanted = [each + ending for each in (name, name.replace("-idx", ".idx")) for ending in ENDINGS]
    for folder in folders:
        try:
            there = os.listdir(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(
                f"the data folder {folder} can't be read: {error.strerror}",
                given=f"data.root={config.root}",
                fix="Make the folder readable, or set another data.root.",
            ) from error
        found = [file for file in wanted if file in there]
        if found:
            return folder / found[0]
    if not config.download:
        raise DataError(
            f"{root} contains no {name}",
            given=f"data.root={config.root} and data.download=false",
            allowed=f"{name} or {name}.gz there or in {folders[1]}",
            fix="Set data.root to the folder with the four files of MNIST, or set data.download=true.",
        )
    path = root / f"{name}.gz"
    fetch(
        [f"{mirror}{name}.gz" for mirror in MIRRORS],
        path,
        MD5[name],
        otherwise="Download the four IDX files of MNIST yourself and set data.root to their folder.",
    )
    return path
