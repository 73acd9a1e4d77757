"""Read an image file of a digit in the format of the training images."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from samebits.errors import DataError
from samebits.recipes.mnist.data import Scale

GrayArray = npt.NDArray[np.float32]

# Ink fainter than this fraction of the darkest ink counts as paper.
_FAINT = 0.2
# Enough for an image of one digit, which is copied several times as floats.
_MAX_PIXELS = 25_000_000


def read_image(path: Path, scale: Scale) -> Tensor:
    """Read an image of one digit as the model's input.

    An image of the size of the training images is used as it is. Any other is cropped to its ink, scaled so that the
    ink fills the same box as in the training images, and its center of mass is moved to the middle. An image with a
    light border is dark ink on paper and is inverted. Transparent pixels count as white paper.

    Returns:
        (1, H, W) float32, normalized.

    Raises:
        DataError: The file can't be read, is not an image, or is empty paper.
    """
    ink = _ink(path)
    if ink.shape != (scale.size_px, scale.size_px):
        ink = _fit(ink, scale)
    return scale.normalize(torch.from_numpy(ink * scale.white)).unsqueeze(0)


def _ink(path: Path) -> GrayArray:
    """Read (H, W) ink: 0 for paper, 1 for full ink."""
    from samebits.data.images import (
        EncodedImage,  # imported late, because training does not need it
    )

    # 16 bits are scaled, and transparent pixels are white.
    pixels = EncodedImage(path, max_pixels=_MAX_PIXELS).pixels()
    gray = np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.float32) / np.float32(255)
    border = np.concatenate([gray[0], gray[-1], gray[:, 0], gray[:, -1]])
    ink = 1 - gray if np.median(border) > 0.5 else gray
    if ink.max() - ink.min() < 0.05:
        raise DataError(
            f"{path} shows nothing: all pixels have the same shade",
            allowed="an image of one digit",
            fix="Use an image with dark ink on a light background, or light ink on a dark one.",
        )
    return ink


def _fit(ink: GrayArray, scale: Scale) -> GrayArray:
    """Scale ink of any size to (size_px, size_px), as in the training images."""
    ink = (ink - ink.min()) / (ink.max() - ink.min())
    ink = np.where(ink < _FAINT, 0, ink).astype(np.float32)
    rows = np.nonzero(ink.max(axis=1))[0]
    columns = np.nonzero(ink.max(axis=0))[0]
    cut = Image.fromarray(ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    factor = scale.box_px / max(cut.size)
    size = (max(1, round(cut.width * factor)), max(1, round(cut.height * factor)))
    # Bicubic interpolation overshoots below 0 and above 1.
    small = np.clip(
        np.asarray(
            cut.resize(size, Image.Resampling.BOX if factor < 1 else Image.Resampling.BICUBIC)
        ),
        0,
        1,
    )
    canvas = np.zeros((scale.size_px, scale.size_px), dtype=np.float32)
    top, left = (_offset(small.sum(axis=1 - axis), scale.size_px) for axis in (0, 1))
    canvas[top : top + small.shape[0], left : left + small.shape[1]] = small
    return canvas


def _offset(mass: npt.NDArray[np.float32], size_px: int) -> int:
    """Compute the offset along one axis that moves the center of mass to the middle."""
    center = float((mass * (np.arange(len(mass)) + 0.5)).sum() / mass.sum())
    return min(max(round(size_px / 2 - center), 0), size_px - len(mass))
