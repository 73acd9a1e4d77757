"""Images of lines: read, brought to a size, and to the numbers that the network sees.

Legend: N images, H and W their height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.data.images import Picture, read_rgb
from lockstep.data.keyed import IntArray
from lockstep.data.opencv import cv2
from lockstep.recipes.text import packed_lmdb
from lockstep.recipes.text.config import HEIGHT_PX

GreyArray = npt.NDArray[np.uint8]

# Wide text lines are small; what is larger than this in a set was not made for it.
_MAX_PACKED_PIXELS = 50_000_000


def read_grey(path: Path) -> GreyArray:
    """An image file as (H, W) bytes.

    Raises:
        DataError: It cannot be read.
    """
    return _grey(read_rgb(path))


def size_of(path: Path) -> tuple[int, int]:
    """(width, height) of an image file, as it is shown.

    Raises:
        DataError: It cannot be read.
    """
    return Picture(path).size


def read_packed(folder: Path, number: int) -> GreyArray:
    """An image of an LMDB set as (H, W) bytes.

    Raises:
        DataError: There is none, or it is damaged.
    """
    return _grey(_packed(folder, number).pixels())


def packed_size(folder: Path, number: int) -> tuple[int, int]:
    """(width, height) of an image of an LMDB set, as it is shown.

    Raises:
        DataError: There is none, or it is no image.
    """
    return _packed(folder, number).size


def stretch(picture: GreyArray, width_px: int) -> GreyArray:
    """(H, W) bytes of any size -> (32, width_px), as the reference does it: bicubic, without padding."""
    resized = cv2.resize(picture, (width_px, HEIGHT_PX), interpolation=cv2.INTER_CUBIC)
    return np.asarray(resized, dtype=np.uint8)


def normalise(pictures: Sequence[GreyArray], mean: float, std: float) -> Tensor:
    """N images of one size -> (N, 1, H, W) float32."""
    pixels = torch.from_numpy(np.stack(pictures)).to(torch.float32)
    return pixels.div_(255).sub_(mean).div_(std).unsqueeze(1)


def nearest_width(widths: Sequence[int], sizes: npt.NDArray[np.float64]) -> IntArray:
    """The width that each image is changed least by, 32 pixels high: of 100 and 160, for 130 the second.

    Args:
        widths: To choose from, rising.
        sizes: (N, 2) widths and heights.

    Returns:
        (N,) places among the widths.
    """
    natural = sizes[:, 0] * (HEIGHT_PX / sizes[:, 1])
    # Halfway is where both change it by the same factor.
    borders = np.sqrt(np.asarray(widths[:-1], dtype=np.float64) * np.asarray(widths[1:]))
    return np.searchsorted(borders, natural, side="right").astype(np.int64)


def _grey(rgb: npt.NDArray[np.uint8]) -> GreyArray:
    return np.asarray(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def _packed(folder: Path, number: int) -> Picture:
    content = packed_lmdb.read_image(folder, number)
    return Picture(f"image-{number:09d} of {folder}", content, max_pixels=_MAX_PACKED_PIXELS)
