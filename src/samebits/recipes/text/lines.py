"""Render synthetic lines of text. The text and the appearance of a line depend only on its key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from samebits.data.opencv import cv2
from samebits.recipes.text.config import HEIGHT_PX, StyleConfig
from samebits.recipes.text.fonts import Font, draw_text
from samebits.recipes.text.images import GreyArray
from samebits.report.fonts import covered, load_font

_FloatArray = npt.NDArray[np.float32]

_SIZES_PX = (30, 36, 42)  # font sizes before the result is scaled to the height of the line


@dataclass(frozen=True)
class LineRenderer:
    """Renders synthetic lines.

    Attributes:
        fonts: Fonts, one of which is chosen at random for each line.
        characters: Characters of the texts. Each line uses only those that its font has.
        min_length: Minimum number of characters of a line.
        max_length: Maximum number of characters of a line.
        style: Appearance of lines.
        height_px: Height of the image.
        width_px: Width of the image, to which the line is resized. None: the width of the text.
    """

    fonts: Sequence[Font]
    characters: str
    min_length: int
    max_length: int
    style: StyleConfig
    height_px: int = HEIGHT_PX
    width_px: int | None = None

    def line(self, key: int, purpose: int) -> tuple[GreyArray, str]:
        """Render a line.

        Args:
            key: Key of the line, in [0, 2**64).
            purpose: Second key: lines of different purposes never share random numbers.

        Returns:
            The image, (H, W) bytes, and its text.
        """
        rng = np.random.default_rng([purpose, key])
        path = self.fonts[int(rng.integers(len(self.fonts)))].path
        known = covered(path, self.characters)
        length = int(rng.integers(self.min_length, self.max_length + 1))
        text = "".join(known[index] for index in rng.integers(len(known), size=length).tolist())
        return self._draw(text, path, rng), text

    def _draw(self, text: str, path: str, rng: np.random.Generator) -> GreyArray:
        style = self.style
        size_px = _SIZES_PX[int(rng.integers(len(_SIZES_PX)))] * max(1, self.height_px // HEIGHT_PX)
        # The third power: most lines have no or little extra space.
        spacing_px = size_px * style.spacing * float(rng.random()) ** 3
        ink, margin = draw_text(load_font(path, size_px), text, spacing_px)
        image = self._warp(ink, margin, rng).astype(np.float32) * np.float32(1 / 255)
        if rng.random() < 0.6:
            image = blur(image, style.blur_px * float(rng.random()))
        paper, contrast = 0.45 + 0.55 * float(rng.random()), 0.4 + 0.5 * float(rng.random())
        contrast = min(contrast, paper)
        ground = np.full_like(image, paper)
        if style.backgrounds:
            ground += draw_background(image.shape, rng) * np.float32(0.35 * contrast)
        grey = ground - np.float32(contrast) * image
        if rng.random() < style.inverted:
            grey = 1 - grey
        grey += np.float32(style.noise * float(rng.random()) ** 2) * rng.standard_normal(image.shape, np.float32)
        return to_bytes(grey)

    def _warp(self, ink: GreyArray, margin: int, rng: np.random.Generator) -> GreyArray:
        """Shear, rotate and scale, in one interpolation."""
        style, (height, width) = self.style, ink.shape
        shear = style.slant * float(rng.uniform(-1, 1)) if rng.random() < 0.5 else 0.0
        angle = math.radians(style.turn_degrees * float(rng.uniform(-1, 1)))
        scale_y = self.height_px / height * float(rng.uniform(0.85, 1.05))
        left, right = rng.uniform(0.1, 1.0, 2) * margin
        used = width - 2 * margin + left + right + abs(shear) * height
        out_width = self.width_px or max(8, round(used * scale_y * float(rng.uniform(0.9, 1.1))))
        scale_x = out_width / used
        # Around the centre of the text: shear, then scale, then rotate.
        centre_x, centre_y = margin + (width - 2 * margin) / 2, height / 2
        tilt = np.array([[scale_x, -shear * scale_x], [0.0, scale_y]])
        turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
        matrix = turn @ tilt
        to_x = out_width / 2 + (left - right) / 2 * scale_x
        to_y = self.height_px / 2 + self.height_px * 0.06 * float(rng.uniform(-1, 1))
        shift = np.array([to_x, to_y]) - matrix @ np.array([centre_x, centre_y])
        whole = np.column_stack([matrix, shift])
        moved = cv2.warpAffine(ink, whole, (out_width, self.height_px), flags=cv2.INTER_LINEAR)
        return np.asarray(moved, dtype=np.uint8)


def draw_background(shape: tuple[int, ...], rng: np.random.Generator) -> _FloatArray:
    """Draw an uneven background, (H, W) in about -0.5 to 0.5: a gradient, blotches, sometimes a stroke."""
    height, width = shape
    slope = np.linspace(-0.5, 0.5, width, dtype=np.float32) * np.float32(rng.uniform(-1, 1))
    ground = np.repeat(slope[None], height, axis=0)
    if rng.random() < 0.5:
        coarse = rng.uniform(-0.5, 0.5, (3, 9)).astype(np.float32)
        ground += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    if rng.random() < 0.15:
        start, end = rng.uniform(0, 1, (2, 2)) * [width, height]
        shade = float(rng.uniform(-1, 1))
        cv2.line(ground, tuple(map(int, start)), tuple(map(int, end)), shade, 1)
    return ground


def blur(image: _FloatArray, sigma_px: float) -> _FloatArray:
    """Blur (H, W) by a Gaussian with this standard deviation in pixels."""
    if sigma_px < 0.2:
        return image
    return cv2.GaussianBlur(image, (5, 5), sigma_px)  # type: ignore[return-value]  # OpenCV's stubs do not keep the dtype


def jitter_line(image: GreyArray, width_px: int, strength: float, rng: np.random.Generator) -> GreyArray:
    """Resize an image of a line to (32, width_px) with random shift, shear, rotation, brightness and blur.

    Args:
        image: (H, W) bytes.
        width_px: Width of the result.
        strength: 0: no change; 1: as much as stays readable.
        rng: Random number generator of this line.

    Returns:
        (32, width_px) bytes.
    """
    height, width = image.shape
    draw = rng.uniform(-1, 1, 6) * strength
    scale_x = width_px / width * (1 + 0.12 * draw[0])
    scale_y = HEIGHT_PX / height * (1 + 0.15 * draw[1])
    shear, turn = 0.25 * draw[2], math.radians(5 * draw[3])
    matrix = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]]) @ np.array(
        [[scale_x, shear * scale_y], [0.0, scale_y]]
    )
    centre = np.array([width_px / 2 * (1 + 0.08 * draw[4]), HEIGHT_PX / 2 * (1 + 0.2 * draw[5])])
    shift = centre - matrix @ np.array([width / 2, height / 2])
    moved = cv2.warpAffine(
        image,
        np.column_stack([matrix, shift]),
        (width_px, HEIGHT_PX),
        flags=cv2.INTER_CUBIC,
        borderMode=cv2.BORDER_REPLICATE,
    )
    grey = moved.astype(np.float32) * np.float32(1 / 255)
    light, contrast = rng.uniform(-1, 1, 2) * strength
    grey = (grey - 0.5) * np.float32(1 + 0.5 * contrast) + np.float32(0.5 + 0.25 * light)
    if rng.random() < 0.5:
        grey = blur(grey, 1.2 * strength * float(rng.random()))
    grey += np.float32(0.06 * strength * float(rng.random())) * rng.standard_normal(grey.shape, np.float32)
    return to_bytes(grey)


def to_bytes(grey: _FloatArray) -> GreyArray:
    """Convert (H, W) brightness in [0, 1] to (H, W) bytes."""
    return np.asarray(np.clip(grey * 255, 0, 255).round(), dtype=np.uint8)
