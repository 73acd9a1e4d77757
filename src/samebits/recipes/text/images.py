"""Read, resize, change at random and normalize images of text lines.

Legend: N images, H and W their height and width in pixels.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.data.images import EncodedImage
from samebits.data.keyed import IntArray
from samebits.data.opencv import cv2
from samebits.portable import floats
from samebits.recipes.text import labels
from samebits.recipes.text.config import HEIGHT_PX

GrayArray = npt.NDArray[np.uint8]

# Text lines are small images. A larger one in an LMDB file is an attack or a mistake.
_MAX_PACKED_PIXELS = 50_000_000


def open_packed(folder: Path, number: int) -> EncodedImage:
    """Open an image of an LMDB dataset. Raises DataError if the dataset has no such entry, or it is not an image."""
    content = labels.read_image(folder, number)
    return EncodedImage(f"image-{number:09d} of {folder}", content, max_pixels=_MAX_PACKED_PIXELS)


def gray(image: EncodedImage) -> GrayArray:
    """Decode an image to (H, W) bytes, after its EXIF rotation. Raises DataError if it is damaged."""
    return np.asarray(cv2.cvtColor(image.pixels(), cv2.COLOR_RGB2GRAY), dtype=np.uint8)


def stretch(image: GrayArray, width_px: int) -> GrayArray:
    """Resize (H, W) bytes to (32, width_px) like the reference: bicubic, without padding."""
    resized = cv2.resize(image, (width_px, HEIGHT_PX), interpolation=cv2.INTER_CUBIC)
    return np.asarray(resized, dtype=np.uint8)


def jitter_line(
    image: GrayArray, width_px: int, strength: float, rng: np.random.Generator
) -> GrayArray:
    """Resize an image of a line to (32, width_px) with random shift, shear, rotation, brightness and blur.

    Args:
        image: (H, W) bytes.
        strength: 0: no change; 1: as much as stays readable.

    Returns:
        (32, width_px) bytes.
    """
    height, width = image.shape
    draw = rng.uniform(-1, 1, 6) * strength
    scale_x = width_px / width * (1 + 0.12 * draw[0])
    scale_y = HEIGHT_PX / height * (1 + 0.15 * draw[1])
    shear = 0.25 * draw[2]
    turn = math.radians(5 * draw[3])
    matrix = np.array(
        [[floats.cos(turn), -floats.sin(turn)], [floats.sin(turn), floats.cos(turn)]]
    ) @ np.array([[scale_x, shear * scale_y], [0.0, scale_y]])
    center = np.array([width_px / 2 * (1 + 0.08 * draw[4]), HEIGHT_PX / 2 * (1 + 0.2 * draw[5])])
    shift = center - matrix @ np.array([width / 2, height / 2])
    moved = cv2.warpAffine(
        image,
        np.column_stack([matrix, shift]),
        (width_px, HEIGHT_PX),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    gray = moved.astype(np.float32) * np.float32(1 / 255)
    light, contrast = rng.uniform(-1, 1, 2) * strength
    gray = (gray - 0.5) * np.float32(1 + 0.5 * contrast) + np.float32(0.5 + 0.25 * light)
    if rng.random() < 0.5:
        sigma_px = 1.2 * strength * float(rng.random())
        if sigma_px >= 0.2:
            gray = cv2.GaussianBlur(gray, (5, 5), sigma_px)  # type: ignore[assignment]  # OpenCV's stubs lose the dtype
    gray += np.float32(0.06 * strength * float(rng.random())) * rng.standard_normal(
        gray.shape, np.float32
    )
    return np.asarray(np.clip(gray * 255, 0, 255).round(), dtype=np.uint8)


def normalize(images: Sequence[GrayArray], mean: float, std: float) -> Tensor:
    """Stack and normalize images of one size.

    Args:
        images: N images, (H, W) uint8.
        mean: Mean to subtract, for pixels in [0, 1].

    Returns:
        (N, 1, H, W) float32.
    """
    pixels = torch.from_numpy(np.stack(images)).to(torch.float32)
    return pixels.div_(255).sub_(mean).div_(std).unsqueeze(1)


def nearest_width(widths: Sequence[int], sizes: npt.NDArray[np.float64]) -> IntArray:
    """Find the width, of ascending ones, that changes the aspect ratio of (N, 2) sizes least, at a height of 32 pixels.

    Returns:
        (N,) indices into `widths`.
    """
    natural = sizes[:, 0] * (HEIGHT_PX / sizes[:, 1])
    # The border between two widths is where both change the image by the same factor.
    borders = np.sqrt(np.asarray(widths[:-1], dtype=np.float64) * np.asarray(widths[1:]))
    return np.searchsorted(borders, natural, side="right").astype(np.int64)
