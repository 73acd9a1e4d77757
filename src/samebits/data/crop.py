"""Random and center crops of images, and their resizing.

Legend: N images, H and W their height and width. Boxes are in whole pixels of the upright image, from its left and top.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2.functional import center_crop

from samebits.data.images import SCALES, ByteArray
from samebits.data.keyed import KeyArray, uniforms
from samebits.data.opencv import cv2
from samebits.portable import floats

# As many as in torchvision's RandomResizedCrop, whose distribution this one has.
_NUM_TRIES = 10
# Largest aspect ratio that is resized whole; of longer images only the middle is. With its shorter side resized to 256,
# an image of 1 x 10,000,000 pixels would take 2 TB.
_LONGEST = 16


class Box(NamedTuple):
    """A rectangle in an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def at(self, scale: int) -> "Box":
        """Return the box in the image decoded at 1/scale of its size, with all values rounded down."""
        return Box(self.left // scale, self.top // scale, self.width // scale, self.height // scale)


class RandomBoxes:
    """Random boxes of N images, with the distribution of torchvision's RandomResizedCrop.

    Args:
        keys: (N,) keys of the samples.
        area: Minimum and maximum share of the image's area, uniform.
        ratio: Minimum and maximum width / height, uniform in the logarithm.
        first_column: Index of the first of 40 random numbers of each key to use.
    """

    def __init__(
        self,
        keys: KeyArray,
        *,
        area: tuple[float, float],
        ratio: tuple[float, float],
        first_column: int = 0,
    ) -> None:
        self._area = area
        self._ratio = ratio
        self._shape = (floats.log(ratio[0]), floats.log(ratio[1]))
        # All tries of all images in one call, since numpy's overhead per call is high.
        self._numbers = uniforms(keys, range(first_column, first_column + 4 * _NUM_TRIES)).tolist()

    def box(self, index: int, size: tuple[int, int]) -> Box:
        """Return the box of the image at `index` of the N, from its (width, height) in pixels."""
        width, height = size
        for start in range(0, 4 * _NUM_TRIES, 4):
            share, shape, down, right = self._numbers[index][start : start + 4]
            area = width * height * (self._area[0] + (self._area[1] - self._area[0]) * share)
            ratio = floats.exp(self._shape[0] + (self._shape[1] - self._shape[0]) * shape)
            box_width = round(math.sqrt(area * ratio))
            box_height = round(math.sqrt(area / ratio))
            if 0 < box_width <= width and 0 < box_height <= height:
                # + 1: a box may also end at the image's border.
                top = int((height - box_height + 1) * down)
                left = int((width - box_width + 1) * right)
                return Box(left, top, box_width, box_height)
        # The largest centered box of an allowed ratio, for images so long that no try was inside.
        box_width = max(1, min(width, round(height * self._ratio[1])))
        box_height = max(1, min(height, round(width / self._ratio[0])))
        return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


def fitting_scale(shorter_px: int, target_px: int, *, margin: float) -> int:
    """Return the largest scale of decoding a JPEG file that leaves a box's shorter side `margin` times the target."""
    return next(scale for scale in SCALES if scale == 1 or shorter_px >= scale * target_px * margin)


def resized(
    pixels: ByteArray, box: Box | None, height: int, width: int, *, mirrored: bool = False
) -> Tensor:
    """Resize an image or a box of it: bilinear, antialiased, in integers.

    Args:
        pixels: (H, W, 3) bytes.
        box: The box; None for the whole image.
        height: Height of the result, pixels.
        width: Width of the result, pixels.
        mirrored: Whether to flip horizontally. The box is flipped before resizing, since it is copied in any case.

    Returns:
        (height, width, 3) bytes.
    """
    if box is not None:
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    if mirrored:
        pixels = cv2.flip(pixels, 1).view(np.uint8)
    # torch would copy a strided box too, and more slowly than numpy.
    image = torch.from_numpy(np.ascontiguousarray(pixels))
    # The batch dimension is added before permuting: torch then recognizes channels_last, which has a fast uint8 kernel.
    result = F.interpolate(
        image.unsqueeze(0).permute(0, 3, 1, 2), (height, width), mode="bilinear", antialias=True
    )
    return result.permute(0, 2, 3, 1)[0]


def resized_shorter(pixels: ByteArray, shorter_px: int, middle_px: int = 0) -> Tensor:
    """Resize an image to a length of its shorter side, as torchvision's Resize does.

    Args:
        pixels: (H, W, 3) bytes.
        shorter_px: Length of the shorter side, pixels.
        middle_px: Length needed from the middle of the longer side, pixels. The rest of very long images is left out.

    Returns:
        (H, W, 3) bytes.
    """
    height, width = pixels.shape[:2]
    shorter = min(height, width)
    longest = shorter * max(_LONGEST, 2 * -(-middle_px // shorter_px))
    top = max(0, height - longest) // 2
    left = max(0, width - longest) // 2
    pixels = pixels[top : height - top, left : width - left]
    height, width = pixels.shape[:2]
    return resized(
        pixels, None, int(shorter_px * height / shorter), int(shorter_px * width / shorter)
    )


def center_square(image: Tensor, side_px: int) -> Tensor:
    """Crop (H, W, 3) bytes to (side, side, 3) as torchvision's CenterCrop does, padding smaller images with black."""
    square: Tensor = center_crop(image.permute(2, 0, 1), [side_px, side_px])
    return square.permute(1, 2, 0)
