"""Which part of a picture is taken, and how it becomes a square of a fixed size.

Legend: N pictures, H and W their height and width, S the side of the square. Boxes are in whole pixels of the upright
picture, from its left and top.
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
# Of a picture that is longer than so many times its shorter side, the middle alone is resized: all of a picture of one
# pixel by millions, brought to 256 by what follows, would take terabytes.
_LONGEST = 16


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def at(self, scale: int) -> Box:
        """The same part of the picture read at 1/scale of its size; left, top and sides rounded down."""
        return Box(self.left // scale, self.top // scale, self.width // scale, self.height // scale)


class RandomBoxes:
    """A part of random area and shape for each picture, distributed as torchvision's RandomResizedCrop has it.

    Args:
        keys: (N,) the samples' keys.
        area: Least and largest share of the picture's area, drawn evenly.
        ratio: Least and largest width / height, drawn evenly in its logarithm.
        first_column: Of the keys' random numbers, from here on up to 40 are used.
    """

    def __init__(
        self, keys: KeyArray, *, area: tuple[float, float], ratio: tuple[float, float], first_column: int = 0
    ) -> None:
        self._area, self._ratio = area, ratio
        self._shape = (math.log(ratio[0]), math.log(ratio[1]))
        # All tries of all pictures at once: numpy's cost for a call is high.
        self._numbers = uniforms(keys, range(first_column, first_column + 4 * _NUM_TRIES)).tolist()

    def box(self, place: int, size: tuple[int, int]) -> Box:
        """The part of the picture at one place among the N, given its (width, height)."""
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
    """The largest centred part whose shape is allowed: for pictures so long that no try fitted."""
    width, height = size
    if width < ratio[0] * height:
        box_width, box_height = width, max(1, min(height, round(width / ratio[0])))
    elif width > ratio[1] * height:
        box_width, box_height = max(1, min(width, round(height * ratio[1]))), height
    else:
        box_width, box_height = width, height
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def fitting_scale(shorter_px: int, target_px: int, *, margin: float) -> int:
    """How much smaller a JPEG file may be read for a part of it to be brought to a size.

    Args:
        shorter_px: The part's shorter side.
        target_px: The size that it will get.
        margin: At least how many pixels are to be left for each of the target's, along a side.
    """
    return next(scale for scale in SCALES if scale == 1 or shorter_px >= scale * target_px * margin)


def resized(pixels: ByteArray, box: Box | None, height: int, width: int) -> Tensor:
    """A part of a picture, or all of it, at another size: bilinear, antialiased, in whole numbers.

    Args:
        pixels: (H, W, 3) bytes.
        box: The part; None for all.
        height: Of the result.
        width: Of the result.

    Returns:
        (height, width, 3) bytes.
    """
    result = F.interpolate(_as_image(_part(pixels, box)), (height, width), mode="bilinear", antialias=True)
    return result.permute(0, 2, 3, 1)[0]


def resize_into(out: Tensor, pixels: ByteArray, box: Box, *, mirrored: bool) -> None:
    """What `resized` gives, put where it is to lie: no copy of it is made.

    Args:
        out: (height, width, 3) bytes.
        pixels: (H, W, 3) bytes.
        box: The part of them.
        mirrored: Whether to turn left and right about. Done with the part, which is copied in any case.
    """
    part = _part(pixels, box)
    if mirrored:
        part = cv2.flip(part, 1).view(np.uint8)
    size = out.shape[:2]
    # The operator behind F.interpolate, which itself has no way to say where the result is to lie.
    torch.ops.aten._upsample_bilinear2d_aa.out(_as_image(part), size, False, None, None, out=_with_colours_first(out))


def _part(pixels: ByteArray, box: Box | None) -> ByteArray:
    return pixels if box is None else pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def _as_image(pixels: ByteArray) -> Tensor:
    # torch would copy a part too, and takes longer.
    return _with_colours_first(torch.from_numpy(np.ascontiguousarray(pixels)))


def _with_colours_first(image: Tensor) -> Tensor:
    # The batch dimension first: with channels last known to torch, it takes its quick kernel for bytes.
    return image.unsqueeze(0).permute(0, 3, 1, 2)


def resized_shorter(pixels: ByteArray, shorter_px: int, middle_px: int = 0) -> Tensor:
    """A picture with its shorter side at a length, as torchvision's Resize: (H, W, 3) bytes.

    Args:
        pixels: (H, W, 3) bytes.
        shorter_px: The length.
        middle_px: How much of the middle is needed of the longer side. Of very long pictures the rest is left out.
    """
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    longest = shorter * max(_LONGEST, 2 * -(-middle_px // shorter_px))
    top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
    pixels = pixels[top : height - top, left : width - left]
    height, width = pixels.shape[:2]
    return resized(pixels, None, int(shorter_px * height / shorter), int(shorter_px * width / shorter))


def centre_square(image: Tensor, side_px: int) -> Tensor:
    """The middle of (H, W, 3) bytes as (side, side, 3), as torchvision's CenterCrop; black where it reaches beyond."""
    height, width = image.shape[:2]
    if height < side_px or width < side_px:
        down, right = max(0, side_px - height), max(0, side_px - width)
        image = F.pad(image, (0, 0, right // 2, right - right // 2, down // 2, down - down // 2))
        height, width = image.shape[:2]
    top, left = round((height - side_px) / 2), round((width - side_px) / 2)
    return image[top : top + side_px, left : left + side_px]
