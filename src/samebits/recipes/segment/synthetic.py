"""Synthetic images of shapes with their masks, drawn from a key."""

from functools import partial

import numpy as np
import numpy.typing as npt
from PIL import Image

from samebits.data.keyed import key as derive_key
from samebits.recipes.segment.data import LabelSource
from samebits.recipes.synthetic_shapes import SHAPES, draw_background, draw_coverage, strong_color

ByteArray = npt.NDArray[np.uint8]

CLASSES = ("background", "circles", "squares", "triangles")
SIZE_PX = 64
_MAX_SHAPES = 3


def draw_image(size_px: int, key: int) -> tuple[ByteArray, ByteArray]:
    """Draw one to three shapes, of which later ones hide earlier ones.

    Args:
        size_px: S, side of the image in pixels.

    Returns:
        (S, S, 3) bytes; and (S, S) bytes, the class of each pixel.
    """
    random = np.random.default_rng(key)
    image = Image.fromarray(draw_background(size_px, size_px, random))
    labels = np.zeros((size_px, size_px), np.uint8)
    for _ in range(int(random.integers(1, _MAX_SHAPES + 1))):
        shape = int(random.integers(1, len(CLASSES)))
        radius = size_px * random.uniform(0.16, 0.3)
        x, y = random.uniform(radius, size_px - radius, 2)
        corners = SHAPES[CLASSES[shape]](random.uniform(-0.2, 0.2))
        mask = draw_coverage([(x + radius * a, y + radius * b) for a, b in corners], size_px, size_px)
        image.paste(strong_color(random), (0, 0), mask)
        labels[np.asarray(mask) >= 128] = shape
    noise = random.normal(0, 4, (size_px, size_px, 1))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8), labels


def synthetic_shapes(count: int, *, train: bool) -> LabelSource:
    """Return synthetic images: other ones in each epoch for training, the same ones for validation."""
    return LabelSource([f"{index:04}" for index in range(count)], partial(_draw, train=train))


def _draw(name: str, key: int, *, train: bool) -> tuple[ByteArray, ByteArray]:
    return draw_image(SIZE_PX, derive_key(key, 1) if train else derive_key(int(name), 2))
