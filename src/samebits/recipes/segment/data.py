"""Batches of images with labels of their pixels.

Legend: N images, H and W the size of an image, h and w that of the model's input.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from samebits.data.crop import Box, RandomBoxes, resized
from samebits.data.images import ByteArray, EncodedImage
from samebits.data.keyed import IntArray, KeyArray, uniform
from samebits.data.samples import Batch, Samples
from samebits.recipes.backbones import normalize
from samebits.recipes.segment.config import MAX_PIXELS, DataConfig

# Columns of a sample's random numbers: the first decides on the flip, the others on the crop.
_FLIP = 0
_CROP = 1
# side of the square in which boxes are drawn, so that their shape is relative to the image's
_UNIT = 1 << 14


@dataclass(frozen=True)
class LabelSource:
    """Images with labels of their pixels."""

    names: Sequence[str]  #: Name of each image.
    read_name: Callable[[str, int], tuple[ByteArray, ByteArray]]  #: See `read`; by name.
    files: Sequence[str | PathLike[str]] | None = None  #: Paths of the files that are read.

    def read(self, index: int, key: int) -> tuple[ByteArray, ByteArray]:
        """Read an image, (H, W, 3) bytes, and its labels, (H, W) bytes: the class of each pixel or `IGNORED`.

        The key of the sample is for images that are drawn.
        """
        return self.read_name(self.names[index], key)


class LabeledImages(Samples):
    """Images resized to one size: random crops with flips for training, whole images for evaluation."""

    is_costly = True

    def __init__(self, source: LabelSource, config: DataConfig, *, train: bool) -> None:
        self.source = source
        self._config = config
        self._train = train
        self.files = source.files

    def __len__(self) -> int:
        return len(self.source.names)

    def batch(self, indices: IntArray, keys: KeyArray) -> Batch:
        """Read a batch.

        Returns:
            inputs (N, h, w, 3) bytes; targets: `labels` (N, h, w) bytes, and for evaluation `masks`, N tensors (H, W)
            of bytes.

        Raises:
            DataError: An image or its labels cannot be read.
        """
        size = self._config.size_px
        images = torch.empty(len(indices), *size, 3, dtype=torch.uint8)
        labels = torch.empty(len(indices), *size, dtype=torch.uint8)
        masks: list[Tensor] = []
        boxes = RandomBoxes(
            keys, area=self._config.crop_area, ratio=self._config.crop_ratio, first_column=_CROP
        )
        flips = (uniform(keys, _FLIP) < self._config.flip).tolist()
        for row, (index, key) in enumerate(zip(indices.tolist(), keys.tolist(), strict=True)):
            pixels, mask = self.source.read(index, key)
            height, width = mask.shape
            box = Box(0, 0, width, height)
            is_mirrored = False
            if self._train:
                box = _scaled(boxes.box(row, (_UNIT, _UNIT)), width, height)
                is_mirrored = flips[row]
            else:
                masks.append(torch.from_numpy(np.ascontiguousarray(mask)))
            images[row] = resized(pixels, box, *size, mirrored=is_mirrored)
            labels[row] = torch.from_numpy(_resized_labels(mask, box, size, is_mirrored))
        targets = {"labels": labels} if self._train else {"labels": labels, "masks": masks}
        return Batch(images, targets, torch.from_numpy(indices))

    def finish(self, batch: Batch) -> Batch:
        """Normalize on the device: inputs become (N, 3, h, w) float32."""
        return dataclasses.replace(batch, inputs=normalize(batch.inputs.permute(0, 3, 1, 2)))


def _scaled(box: Box, width: int, height: int) -> Box:
    """Return a box of the unit square in an image of (width, height)."""
    left = box.left * width // _UNIT
    top = box.top * height // _UNIT
    return Box(left, top, max(1, box.width * width // _UNIT), max(1, box.height * height // _UNIT))


def _resized_labels(
    labels: ByteArray, box: Box, size: tuple[int, int], is_mirrored: bool
) -> ByteArray:
    """Resize a box of (H, W) labels to (h, w) by the nearest pixel, aligned as `resized` does."""
    height, width = size
    rows = box.top + (2 * np.arange(height) + 1) * box.height // (2 * height)
    columns = box.left + (2 * np.arange(width) + 1) * box.width // (2 * width)
    return labels[rows[:, None], columns[::-1] if is_mirrored else columns]


def read_image(path: Path, config: DataConfig) -> Tensor:
    """Read an image file as evaluation does: (3, h, w) float32, normalized.

    Raises:
        DataError: The file is not an image, or is damaged.
    """
    pixels = EncodedImage(path, max_pixels=MAX_PIXELS).pixels()
    return normalize(resized(pixels, None, *config.size_px).permute(2, 0, 1))
