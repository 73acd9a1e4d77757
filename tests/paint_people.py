"""Paint synthetic people: skin, shirt, trousers, and a face."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import ImageDraw

from samebits.recipes.pose.skeletons import COCO
from samebits.recipes.pose.view import Floats

Color = tuple[int, int, int]
_JOINT = {name: index for index, name in enumerate(COCO.joints)}


def random_color(random: np.random.Generator) -> Color:
    """Draw a random color."""
    red, green, blue = random.integers(0, 256, 3).tolist()
    return red, green, blue


class Painter:
    """Painter of one person on an image, and of the same shapes on the map of owners.

    Args:
        canvases: The canvas of the image and the canvas of the map.
        joints: (17, 2) x, y in pixels.
        height: Height of the person, pixels.
        random: Source of the colors.
    """

    def __init__(
        self, canvases: Sequence[ImageDraw.ImageDraw], joints: Floats, height: float, random: np.random.Generator
    ) -> None:
        self._canvases, self._joints, self._height = canvases, joints, height
        tone = random.uniform(0.45, 1.0)
        self._skin: Color = (int(240 * tone), int(195 * tone), int(160 * tone))
        self._shirt, self._trousers = random_color(random), random_color(random)

    def paint(self, owner: int) -> None:
        """Paint legs, body, head and arms, from back to front."""
        self._owner = owner
        dark: Color = (int(self._shirt[0] * 0.75), int(self._shirt[1] * 0.75), int(self._shirt[2] * 0.75))
        for side in ("left", "right"):
            self._stroke(self._trousers, 0.1, f"{side}_hip", f"{side}_knee", f"{side}_ankle")
            self._disc((30, 25, 25), 0.045, f"{side}_ankle")
        corners = [self._spot(name) for name in ("left_shoulder", "right_shoulder", "right_hip", "left_hip")]
        self._polygon(self._shirt, corners)
        self._stroke(self._shirt, 0.1, "left_shoulder", "right_shoulder")
        self._stroke(self._trousers, 0.11, "left_hip", "right_hip")
        self._head()
        for side in ("left", "right"):
            self._stroke(dark, 0.08, f"{side}_shoulder", f"{side}_elbow")
            self._stroke(self._skin, 0.065, f"{side}_elbow", f"{side}_wrist")
            self._disc(self._skin, 0.042, f"{side}_wrist")

    def _head(self) -> None:
        ears = [np.array(self._spot(f"{side}_ear")) for side in ("left", "right")]
        middle = (ears[0] + ears[1]) / 2
        neck = (np.array(self._spot("left_shoulder")) + np.array(self._spot("right_shoulder"))) / 2
        self._line(self._skin, 0.08, [tuple(middle), tuple(neck)])
        for side in ("left", "right"):
            self._disc(self._skin, 0.035, f"{side}_ear")
        self._round(self._skin, 0.105, (float(middle[0]), float(middle[1])))
        for side in ("left", "right"):
            self._disc((250, 250, 250), 0.028, f"{side}_eye")
            self._disc((20, 20, 30), 0.016, f"{side}_eye")
        self._disc((200, 70, 60), 0.022, "nose")

    def _spot(self, name: str) -> tuple[float, float]:
        x, y = self._joints[_JOINT[name]].tolist()
        return x, y

    def _stroke(self, color: Color, width: float, *names: str) -> None:
        self._line(color, width, [self._spot(name) for name in names])
        for name in names:
            self._disc(color, width / 2, name)

    def _line(self, color: Color, width: float, spots: Sequence[tuple[float, ...]]) -> None:
        points = [(x, y) for x, y in spots]
        for canvas, ink in self._inks(color):
            canvas.line(points, fill=ink, width=max(1, round(width * self._height)))

    def _disc(self, color: Color, radius: float, name: str) -> None:
        self._round(color, radius, self._spot(name))

    def _round(self, color: Color, radius: float, spot: tuple[float, float]) -> None:
        reach, (x, y) = radius * self._height, spot
        for canvas, ink in self._inks(color):
            canvas.ellipse((x - reach, y - reach, x + reach, y + reach), fill=ink)

    def _polygon(self, color: Color, corners: Sequence[tuple[float, float]]) -> None:
        for canvas, ink in self._inks(color):
            canvas.polygon(list(corners), fill=ink)

    def _inks(self, color: Color) -> list[tuple[ImageDraw.ImageDraw, Any]]:
        return list(zip(self._canvases, (color, self._owner), strict=True))
