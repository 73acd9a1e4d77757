"""The affine transform of an image, its mask and its joints.

Points are (x, y) with the center of the first pixel at (0, 0), as in OpenCV. The transform is that of the HigherHRNet
authors' implementation: a square of 200 * scale pixels around a center fills the result.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import uniform
from samebits.data.opencv import cv2
from samebits.portable import floats
from samebits.recipes.pose.config import DataConfig
from samebits.recipes.pose.skeletons import Skeleton

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]
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
        linear = factor * np.array([[floats.cos(turn), -floats.sin(turn)], [floats.sin(turn), floats.cos(turn)]])
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

    def warp(self, pixels: Pixels, size_px: int) -> Pixels:
        """Transform (H, W) or (H, W, 3) bytes to (size_px, size_px ...), bilinear; black outside of the image."""
        matrix = self.matrix(size_px)
        if self.is_mirrored:
            matrix[0] *= -1
            matrix[0, 2] += size_px - 1
        # OpenCV needs half the time for four channels that it needs for three, with equal results.
        has_colors = pixels.ndim == 3
        source = cv2.cvtColor(pixels, cv2.COLOR_RGB2RGBA) if has_colors else pixels
        warped: Any = cv2.warpAffine(source, matrix, (size_px, size_px))
        return np.asarray(cv2.cvtColor(warped, cv2.COLOR_RGBA2RGB) if has_colors else warped, np.uint8)


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
