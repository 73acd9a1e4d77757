"""Random shift, shear, rotation, brightness and blur of images of text lines."""

import math

import numpy as np

from samebits.data.opencv import cv2
from samebits.portable import floats
from samebits.recipes.text.config import HEIGHT_PX
from samebits.recipes.text.images import GrayArray


def jitter_line(image: GrayArray, width_px: int, strength: float, rng: np.random.Generator) -> GrayArray:
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
    shear, turn = 0.25 * draw[2], math.radians(5 * draw[3])
    matrix = np.array([[floats.cos(turn), -floats.sin(turn)], [floats.sin(turn), floats.cos(turn)]]) @ np.array(
        [[scale_x, shear * scale_y], [0.0, scale_y]]
    )
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
    gray += np.float32(0.06 * strength * float(rng.random())) * rng.standard_normal(gray.shape, np.float32)
    return np.asarray(np.clip(gray * 255, 0, 255).round(), dtype=np.uint8)
