"""The sizes at which the network looks at an image, and the way back from its maps to the image.

As HigherHRNet's test path (`get_multi_scale_size`, `resize_align_multi_scale`, `get_final_preds`): a view lies around
the image's centre, has the image's own proportions but for the long side, which is rounded up to whole 64 pixels,
and is black beyond the image. All views of an image show the same part of it.

Coordinates: x to the right, y down, (0, 0) the centre of the top left pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.errors import DataError

# Sides of views at the smallest scale are multiples of this.
STEP_PX = 64
# The network sees an image's short side at a fixed size: of one pixel by a million it would see 262 billion.
MAX_RATIO = 16


@dataclass(frozen=True)
class View:
    """An image at the size that the network gets.

    Attributes:
        width: Of the view, pixels.
        height: Of the view, pixels.
        centre: x and y in the image of the view's middle, width / 2 and height / 2.
        factor: Pixels of the image for one of the view.
    """

    width: int
    height: int
    centre: tuple[int, int]
    factor: float

    def sample(self, picture: Tensor) -> Tensor:
        """(3, H, W) uint8 -> (3, height, width) uint8: bilinear, rounded, black beyond the image."""
        values = picture.to(torch.float32)
        for axis, size, centre in ((2, self.width, self.centre[0]), (1, self.height, self.centre[1])):
            places = (torch.arange(size, dtype=torch.float64) - size / 2) * self.factor + centre
            values = _sample_axis(values, axis, places)
        return values.add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)

    def to_picture(self, points: npt.NDArray[np.float64], map_width: int, map_height: int) -> npt.NDArray[np.float64]:
        """Where points of a map lie in the image.

        Args:
            points: (..., 2) x and y on a map that shows this view.
            map_width: Of the map, pixels.
            map_height: Of the map, pixels.

        Returns:
            (..., 2) x and y in the image.
        """
        # One factor for both axes, of the width, as in the reference.
        factor = self.factor * self.width / map_width
        moved: npt.NDArray[np.float64] = (points - (map_width / 2, map_height / 2)) * factor + self.centre
        return moved

    def crop(self, maps: Tensor, width: int, height: int) -> Tensor:
        """(C, h, w) maps that show this view -> the part of them that shows the image, of width and height pixels."""
        ranges = []
        factor = self.factor * self.width / maps.shape[2]
        for axis, size, centre in ((1, height, self.centre[1]), (2, width, self.centre[0])):
            first, end = (round(maps.shape[axis] / 2 + (edge - centre) / factor) for edge in (0, size))
            ranges.append(slice(max(0, first), max(first + 1, end)))
        return maps[:, ranges[0], ranges[1]]


def check_shape(name: object, width: int, height: int) -> None:
    """Refuse an image that is so long that looking at it would take all memory.

    Raises:
        DataError: It is.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise DataError(
            f"{name} is {width}x{height}, too long to look for people in",
            allowed=f"a long side of up to {MAX_RATIO} times the short one",
            fix="cut it into parts, or take it out",
        )


def view(width: int, height: int, *, size_px: int, scale: float, min_scale: float) -> View:
    """How the network sees an image at one scale.

    Args:
        width: Of the image.
        height: Of the image.
        size_px: The short side at scale 1.
        scale: This view's scale.
        min_scale: The smallest scale at which this image is looked at; rounding is done there.
    """
    short = int((min_scale * size_px + STEP_PX - 1) // STEP_PX * STEP_PX)
    long_side, short_side = max(width, height), min(width, height)
    # In this order of operations, or rounding differs from the reference's at some sizes.
    long = int(int((short / short_side * long_side + STEP_PX - 1) // STEP_PX * STEP_PX) * scale / min_scale)
    short = int(short * scale / min_scale)
    wide, high = (short, long) if width < height else (long, short)
    covered = width if width < height else wide / high * height
    return View(wide, high, (int(width / 2 + 0.5), int(height / 2 + 0.5)), covered / wide)


def _sample_axis(values: Tensor, axis: int, places: Tensor) -> Tensor:
    """(3, H, W) float -> the values at fractional places along one axis, linear, 0 beyond the ends."""
    last = values.shape[axis] - 1
    low = places.floor()
    parts = []
    for at, weight in ((low, 1 - (places - low)), (low + 1, places - low)):
        weight = (weight * ((at >= 0) & (at <= last))).to(torch.float32)
        shape = [1, 1, 1]
        shape[axis] = len(places)
        index = at.clamp(0, last).to(torch.int64)
        parts.append(values.index_select(axis, index.to(values.device)) * weight.view(shape).to(values.device))
    return parts[0].add_(parts[1])
