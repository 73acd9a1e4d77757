"""Make a synthetic dataset: images/ and masks/."""

import shlex
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from samebits.data.images import ByteArray
from samebits.data.keyed import key
from samebits.recipes.segment.config import MakeConfig
from samebits.recipes.segment.data import LabelSource
from samebits.recipes.synthetic_shapes import SHAPES, draw_background, draw_coverage, strong_color

# Synthetic images of shapes with their masks, drawn from a key.

CLASSES = ("background", "circles", "squares", "triangles")
SIZE_PX = 64
_MAX_SHAPES = 3


def draw_image(size_px: int, image_key: int) -> tuple[ByteArray, ByteArray]:
    """Draw one to three shapes, of which later ones hide earlier ones.

    Args:
        size_px: S, side of the image in pixels.

    Returns:
        (S, S, 3) bytes; and (S, S) bytes, the class of each pixel.
    """
    random = np.random.default_rng(image_key)
    image = Image.fromarray(draw_background(size_px, size_px, random))
    labels = np.zeros((size_px, size_px), np.uint8)
    for _ in range(int(random.integers(1, _MAX_SHAPES + 1))):
        shape = int(random.integers(1, len(CLASSES)))
        radius = size_px * random.uniform(0.16, 0.3)
        x, y = random.uniform(radius, size_px - radius, 2)
        corners = SHAPES[CLASSES[shape]](random.uniform(-0.2, 0.2))
        mask = draw_coverage(
            [(x + radius * a, y + radius * b) for a, b in corners], size_px, size_px
        )
        image.paste(strong_color(random), (0, 0), mask)
        labels[np.asarray(mask) >= 128] = shape
    noise = random.normal(0, 4, (size_px, size_px, 1))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8), labels


def synthetic_shapes(count: int, *, train: bool) -> LabelSource:
    """Return synthetic images: other ones in each epoch for training, the same ones for validation."""
    return LabelSource([f"{index:04}" for index in range(count)], partial(_draw, train=train))


def _draw(name: str, sample_key: int, *, train: bool) -> tuple[ByteArray, ByteArray]:
    return draw_image(SIZE_PX, key(sample_key, 1) if train else key(int(name), 2))


def make(config: MakeConfig, out: Path) -> str:
    """Write the dataset into an empty folder. Returns a summary for the user, with the command that trains on it."""
    (out / "images").mkdir(parents=True)
    (out / "masks").mkdir()
    for index in range(config.num_images):
        pixels, labels = draw_image(config.size_px, key(config.seed, 3, index))
        Image.fromarray(pixels).save(out / "images" / f"{index:04}.jpg", quality=92)
        Image.fromarray(labels).save(out / "masks" / f"{index:04}.png")
    command = shlex.join(["samebits", "train", "segment", f"data.root={out}", "data.size_px=96"])
    return f"{config.num_images:,} images of shapes with masks; train with   {command}"
