"""Synthetic images of shapes in strong colors on dull backgrounds, to try recipes without data."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw

from samebits.data.images import ByteArray

Points = list[tuple[float, float]]


def draw_shape(
    outline: Callable[[float], Points], size_px: int, random: np.random.Generator
) -> Image.Image:
    """Draw one RGB image with a shape.

    Args:
        outline: Function from a rotation in radians to the points of the shape in the unit circle.
        size_px: Longer side of the image, pixels.
    """
    shorter = int(size_px * random.uniform(0.7, 1.0))
    width, height = (size_px, shorter) if random.random() < 0.5 else (shorter, size_px)
    image = Image.fromarray(draw_background(width, height, random))
    radius = min(width, height) * random.uniform(0.3, 0.46)
    center = (random.uniform(radius, width - radius), random.uniform(radius, height - radius))
    points = [
        (center[0] + radius * x, center[1] + radius * y)
        for x, y in outline(random.uniform(-0.2, 0.2))
    ]
    mask = draw_coverage(points, width, height)
    # A strong color on a dull background: each channel is either low or high.
    image.paste(strong_color(random), (0, 0), mask)
    noise = random.normal(0, 4, (height, width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def draw_coverage(points: Points, width: int, height: int) -> Image.Image:
    """Draw a polygon with smooth edges: white inside, black outside.

    Args:
        points: Its corners: x, y in pixels.
        width: Width of the image, pixels.
        height: Height of the image, pixels.
    """
    # Drawn four times as large and reduced, for smooth edges.
    mask = Image.new("L", (4 * width, 4 * height))
    ImageDraw.Draw(mask).polygon([(4 * x, 4 * y) for x, y in points], fill=255)
    return mask.resize((width, height), Image.Resampling.BOX)


def strong_color(random: np.random.Generator) -> tuple[int, ...]:
    """Choose a color whose channels are each either low or high."""
    return tuple(
        int(low + 195 * high)
        for low, high in zip(random.integers(0, 61, 3), random.integers(0, 2, 3), strict=True)
    )


def draw_background(width: int, height: int, random: np.random.Generator) -> ByteArray:
    """Draw (height, width, 3) bytes: a few large soft spots of dull colors.

    Args:
        width: Width of the image, pixels.
        height: Height of the image, pixels.
    """
    spots = Image.fromarray(random.integers(105, 151, (3, 3, 3), dtype=np.uint8))
    return np.asarray(spots.resize((width, height), Image.Resampling.BICUBIC))


def _polygon(num_corners: int, turn: float, inner: float | None = None) -> Points:
    """Return the points of a regular polygon in the unit circle; with an inner radius, of a star."""
    num_points = num_corners if inner is None else 2 * num_corners
    points = []
    for index in range(num_points):
        angle = turn - math.pi / 2 + 2 * math.pi * index / num_points
        radius = 1.0 if inner is None or index % 2 == 0 else inner
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return points


def _cross(turn: float) -> Points:
    corners = [
        (-1, 3), (1, 3), (1, 1), (3, 1), (3, -1), (1, -1), (1, -3), (-1, -3), (-1, -1), (-3, -1), (-3, 1), (-1, 1),
    ]  # fmt: skip
    sine = math.sin(turn) / math.sqrt(10)
    cosine = math.cos(turn) / math.sqrt(10)
    return [(x * cosine - y * sine, x * sine + y * cosine) for x, y in corners]


SHAPES: dict[str, Callable[[float], Points]] = {
    "circles": lambda turn: _polygon(60, turn),
    "crosses": _cross,
    "squares": lambda turn: _polygon(4, turn + math.pi / 4),
    "stars": lambda turn: _polygon(5, turn, inner=0.42),
    "triangles": lambda turn: _polygon(3, turn),
}
