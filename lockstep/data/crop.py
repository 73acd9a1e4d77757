"""Random and center crops of images, and resizing.

N images of height H and width W. Boxes are in whole pixels of the upright image, from its left and top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.data.images import SCALES, ByteArray
from lockstep.data.keyed import KeyArray, uniforms
from lockstep.data.opencv import cv2

_NUM_TRIES = 10
# Limit on longer / shorter side. Only the middle of a longer image is resized: an image of 1 by millions of pixels,
# with its shorter side resized to 256, would take terabytes.
_LONGEST = 16


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def at(self, scale: int) -> Box:
        """Return the same part of the image decoded at 1 / scale of its size; all values are rounded down."""
        return Box(self.left // scale, self.top // scale, self.width // scale, self.height // scale)


class RandomBoxes:
    """A box of random area and shape for each image, distributed as in torchvision's RandomResizedCrop.

    Args:
        keys: (N,) keys of the samples.
        area: Minimum and maximum fraction of the image's area, uniform.
        ratio: Minimum and maximum width / height, uniform in its logarithm.
        first_column: First of up to 40 random numbers per key.
    """

    def __init__(
        self, keys: KeyArray, *, area: tuple[float, float], ratio: tuple[float, float], first_column: int = 0
    ) -> None:
        self._area, self._ratio = area, ratio
        self._shape = (math.log(ratio[0]), math.log(ratio[1]))
        # All tries of all images at once, because each call of numpy is expensive.
        self._numbers = uniforms(keys, range(first_column, first_column + 4 * _NUM_TRIES)).tolist()

    def box(self, place: int, size: tuple[int, int]) -> Box:
        """Return the box of one of the N images, given its (width, height)."""
        numbers = self._numbers[place]
        for start in range(0, 4 * _NUM_TRIES, 4):
            box = _try_box(size, numbers[start : start + 4], self._area, self._shape)
            if box is not None:
                return box
        return _widest_box(size, self._ratio)


def _try_box(
    size: tuple[int, int], numbers: Sequence[float], area: tuple[float, float], log_ratio: tuple[float, float]
) -> Box | None:
    width, height = size
    target = width * height * (area[0] + (area[1] - area[0]) * numbers[0])
    shape = math.exp(log_ratio[0] + (log_ratio[1] - log_ratio[0]) * numbers[1])
    box_width, box_height = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
    if not (0 < box_width <= width and 0 < box_height <= height):
        return None
    top, left = int((height - box_height + 1) * numbers[2]), int((width - box_width + 1) * numbers[3])
    return Box(left, top, box_width, box_height)


def _widest_box(size: tuple[int, int], ratio: tuple[float, float]) -> Box:
    """Return the largest center box of an allowed shape, for images so long that no try fits."""
    width, height = size
    if width < ratio[0] * height:
        box_width, box_height = width, max(1, min(height, round(width / ratio[0])))
    elif width > ratio[1] * height:
        box_width, box_height = max(1, min(width, round(height * ratio[1]))), height
    else:
        box_width, box_height = width, height
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def fitting_scale(shorter_px: int, target_px: int, *, margin: float) -> int:
    """Return the largest scale at which a JPEG file can be decoded before a part of it is resized.

    Args:
        shorter_px: Shorter side of the part.
        target_px: Its size after resizing.
        margin: Minimum number of decoded pixels per target pixel, along a side.
    """
    return next(scale for scale in SCALES if scale == 1 or shorter_px >= scale * target_px * margin)


def resized(pixels: ByteArray, box: Box | None, height: int, width: int) -> Tensor:
    """Resize a part of an image: bilinear, antialiased, in integers.

    Args:
        pixels: (H, W, 3) bytes.
        box: The part. None: all.
        height: Height of the result.
        width: Width of the result.

    Returns:
        (height, width, 3) bytes.
    """
    result = F.interpolate(_as_image(_part(pixels, box)), (height, width), mode="bilinear", antialias=True)
    return result.permute(0, 2, 3, 1)[0]


def resize_into(out: Tensor, pixels: ByteArray, box: Box, *, mirrored: bool) -> None:
    """Write the result of `resized` into a tensor, without a copy.

    Args:
        out: (height, width, 3) bytes.
        pixels: (H, W, 3) bytes.
        box: The part.
        mirrored: Whether to flip the image horizontally. This is done on the part, which is copied in any case.
    """
    part = _part(pixels, box)
    if mirrored:
        part = cv2.flip(part, 1).view(np.uint8)
    size = out.shape[:2]
    # The operator behind F.interpolate, which itself has no `out` argument.
    torch.ops.aten._upsample_bilinear2d_aa.out(_as_image(part), size, False, None, None, out=_with_colours_first(out))


def _part(pixels: ByteArray, box: Box | None) -> ByteArray:
    return pixels if box is None else pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _as_image(pixels: ByteArray) -> Tensor:
    # torch would copy a part too, more slowly.
    return _with_colours_first(torch.from_numpy(np.ascontiguousarray(pixels)))


def _with_colours_first(image: Tensor) -> Tensor:
    # The batch dimension first: torch then sees channels-last memory and uses its fast kernel for bytes.
    return image.unsqueeze(0).permute(0, 3, 1, 2)


def resized_shorter(pixels: ByteArray, shorter_px: int, middle_px: int = 0) -> Tensor:
    """Resize the shorter side of an image to a length, as torchvision's Resize: (H, W, 3) bytes.

    Args:
        pixels: (H, W, 3) bytes.
        shorter_px: Length of the shorter side of the result.
        middle_px: Length of the middle of the longer side that is needed. The rest of very long images is cut off.
    """
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    longest = shorter * max(_LONGEST, 2 * -(-middle_px // shorter_px))
    top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
    pixels = pixels[top : height - top, left : width - left]
    height, width = pixels.shape[:2]
    return resized(pixels, None, int(shorter_px * height / shorter), int(shorter_px * width / shorter))


def centre_square(image: Tensor, side_px: int) -> Tensor:
    """Crop the center of (H, W, 3) bytes to (side, side, 3), as torchvision's CenterCrop, padded with black."""
    height, width = image.shape[:2]
    if height < side_px or width < side_px:
        down, right = max(0, side_px - height), max(0, side_px - width)
        image = F.pad(image, (0, 0, right // 2, right - right // 2, down // 2, down - down // 2))
        height, width = image.shape[:2]
    top, left = round((height - side_px) / 2), round((width - side_px) / 2)
    return image[top : top + side_px, left : left + side_px]
