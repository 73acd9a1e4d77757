"""Views: an image resized to the network's input, and the transform from its maps back to the image.

As in HigherHRNet's test path (`get_multi_scale_size`, `resize_align_multi_scale`, `get_final_preds`): a view has the
center and the aspect ratio of the image, but its longer side is rounded up to a multiple of 64 pixels and is black
beyond the image. All views of an image show the same part of it.

Coordinates: x to the right, y down, (0, 0) the center of the top left pixel.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.data.images import ByteArray
from samebits.data.keyed import uniform
from samebits.data.opencv import cv2
from samebits.errors import DataError
from samebits.portable import floats
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.skeletons import Skeleton

# The affine transform of an image, its mask and its joints.
#
# Points are (x, y) with the center of the first pixel at (0, 0), as in OpenCV. The transform is that of the HigherHRNet
# authors' implementation: a square of 200 * scale pixels around a center fills the result.


Floats = npt.NDArray[np.float64]
UNIT_PX = 200.0


@dataclass(frozen=True)
class Placement:
    """A transform from an image to a square."""

    center: tuple[float, float]  #: (x, y) of the point of the image in the middle of the square.
    scale: float  #: The square shows 200 * scale pixels of the image, in both directions.
    rotation_deg: float = 0.0  #: Counter-clockwise rotation of the image.
    is_mirrored: bool = False  #: Whether left and right are swapped, after the rotation.

    def matrix(self, size_px: int) -> Floats:
        """Return the (2, 3) matrix from image points to points of a square of this size, before the flip."""
        factor = size_px / (UNIT_PX * self.scale)
        turn = -math.radians(self.rotation_deg)
        linear = factor * np.array(
            [[floats.cos(turn), -floats.sin(turn)], [floats.sin(turn), floats.cos(turn)]]
        )
        offset = size_px / 2 - linear @ np.array(self.center)
        return np.column_stack([linear, offset])

    def points(self, points: Floats, size_px: int) -> Floats:
        """Transform (..., 2) points of the image to points of a square of this size."""
        matrix = self.matrix(size_px)
        placed = points @ matrix[:, :2].T + matrix[:, 2]
        if self.is_mirrored:
            placed[..., 0] = size_px - placed[..., 0] - 1
        return placed

    def joints(self, joints: Floats, size_px: int, skeleton: Skeleton) -> Floats:
        """Transform (P, K, 3 or more) joints (x, y, visible ...) of the image to a square of this size.

        In a mirrored image, left and right joints are swapped.

        Args:
            joints: (P, K, 3 or more).
        """
        placed = joints.copy()
        placed[..., :2] = self.points(joints[..., :2], size_px)
        return placed[:, list(skeleton.mirrored)] if self.is_mirrored else placed

    def warp(self, pixels: ByteArray, size_px: int) -> ByteArray:
        """Transform (H, W) or (H, W, 3) bytes to (size_px, size_px ...), bilinear; black outside of the image."""
        matrix = self.matrix(size_px)
        if self.is_mirrored:
            matrix[0] *= -1
            matrix[0, 2] += size_px - 1
        return np.asarray(cv2.warpAffine(pixels, matrix, (size_px, size_px)), np.uint8)


def draw_placement(width: int, height: int, key: int, config: DataConfig) -> Placement:
    """Draw a random placement as a function of a key.

    Args:
        width: Width of the image, pixels.
        height: Height of the image, pixels.
    """
    keys = np.array([key], dtype=np.uint64)
    scaled, turned, right, down, mirrored = (float(uniform(keys, column)[0]) for column in range(5))
    side = min(width, height) if config.scale_side == "short" else max(width, height)
    scale = side / UNIT_PX * (config.min_scale + scaled * (config.max_scale - config.min_scale))
    reach = int(config.max_shift_px * scale)
    # Whole pixels from -reach to reach - 1, as the reference draws them.
    shifts = [math.floor(share * 2 * reach) - reach for share in (right, down)]
    return Placement(
        center=(width / 2 + shifts[0], height / 2 + shifts[1]),
        scale=scale,
        rotation_deg=(2 * turned - 1) * config.max_rotation_deg,
        is_mirrored=mirrored < config.flip,
    )


# Sides of views at the smallest scale are multiples of this.
STEP_PX = 64
# The shorter side is resized to a fixed size: an image of 1 by a million pixels would become one of 262 billion.
MAX_RATIO = 32


@dataclass(frozen=True)
class ImageView:
    """A size and position at which the network processes an image."""

    width: int  #: Width of the view, pixels.
    height: int  #: Height of the view, pixels.
    center: tuple[int, int]  #: (x, y) in the image of the middle of the view.
    factor: float  #: ByteArray of the image per pixel of the view.

    def sample(self, image: Tensor) -> Tensor:
        """Resample (3, H, W) uint8 to (3, height, width) uint8: bilinear, rounded, black beyond the image."""
        values = image.to(torch.float32)
        for axis, size, center in (
            (2, self.width, self.center[0]),
            (1, self.height, self.center[1]),
        ):
            places = (torch.arange(size, dtype=torch.float64) - size / 2) * self.factor + center
            values = _sample_axis(values, axis, places)
        return values.add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)

    def to_image(self, points: Floats, map_width: int, map_height: int) -> Floats:
        """Transform points of a map of this view to points of the image.

        Args:
            points: (..., 2) x and y in pixels of the map.
            map_width: Width of the map, pixels.
            map_height: Height of the map, pixels.

        Returns:
            (..., 2) x and y in the image.
        """
        # As in the reference, one factor for both axes, that of the width.
        factor = self.factor * self.width / map_width
        moved: Floats = (points - (map_width / 2, map_height / 2)) * factor + self.center
        return moved


def check_shape(name: object, width: int, height: int) -> None:
    """Refuse an image so long that its views would take too much memory.

    Args:
        width: Width, pixels.
        height: Height, pixels.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise DataError(
            f"{name} is {width}x{height}, too long for pose estimation",
            allowed=f"a longer side of at most {MAX_RATIO} times the shorter one",
            fix="Cut it into parts, or remove it.",
        )


def view(width: int, height: int, *, size_px: int, scale: float, min_scale: float) -> ImageView:
    """Make the view of an image at one scale.

    Args:
        width: Width of the image, pixels.
        height: Height of the image, pixels.
        size_px: Shorter side at scale 1, pixels.
        min_scale: Smallest scale of all views of this image. Sizes are rounded at this scale.
    """
    short = int((min_scale * size_px + STEP_PX - 1) // STEP_PX * STEP_PX)
    long_side = max(width, height)
    short_side = min(width, height)
    # Another order of operations would round differently from the reference at some sizes.
    long = int(
        int((short / short_side * long_side + STEP_PX - 1) // STEP_PX * STEP_PX) * scale / min_scale
    )
    short = int(short * scale / min_scale)
    wide, high = (short, long) if width < height else (long, short)
    covered = width if width < height else wide / high * height
    return ImageView(wide, high, (int(width / 2 + 0.5), int(height / 2 + 0.5)), covered / wide)


def _sample_axis(values: Tensor, axis: int, places: Tensor) -> Tensor:
    """Sample (3, H, W) floats at fractional positions along one axis: linear, 0 beyond the ends."""
    last = values.shape[axis] - 1
    low = places.floor()
    parts = []
    for at, weight in ((low, 1 - (places - low)), (low + 1, places - low)):
        weight = (weight * ((at >= 0) & (at <= last))).to(torch.float32)
        shape = [1, 1, 1]
        shape[axis] = len(places)
        index = at.clamp(0, last).to(torch.int64)
        parts.append(
            values.index_select(axis, index.to(values.device))
            * weight.view(shape).to(values.device)
        )
    return parts[0].add_(parts[1])
