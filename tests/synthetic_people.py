"""Synthetic images of people with ground truth exact to the pixel: drawn when loaded, or as files in COCO's layout."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from samebits.data.images import ByteArray
from samebits.data.keyed import key as make_key
from samebits.engine.parts import Parts
from samebits.recipes.pose.config import Config
from samebits.recipes.pose.data import EvalImages, Example, TrainImages
from samebits.recipes.pose.skeletons import COCO
from samebits.recipes.pose.view import Floats
from tests.paint_people import Painter, random_color

MAX_PEOPLE = 4
MIN_SHARE, MAX_SHARE = 0.4, 0.85  # height of a person as a fraction of the height of the image
OCCLUDED, VISIBLE = 1, 2
EVAL = 5  # first part of the keys of validation images, never of training images


@dataclass(frozen=True)
class Drawing:
    """A synthetic image.

    Attributes:
        rgb: (H, W, 3).
        joints: (P, 17, 3): x, y in pixels, and 2 visible, 1 occluded by another person, 0 outside of the image.
        owners: (H, W): 0 for the background, else the number of the person, from 1.
    """

    rgb: ByteArray
    joints: Floats
    owners: ByteArray

    @property
    def boxes(self) -> Floats:
        """(P, 4) x, y, width, height of the visible part of each person, pixels."""
        return np.array([_box(self.owners == person + 1) for person in range(len(self.joints))]).reshape(-1, 4)


class SyntheticPeople:
    """A source of synthetic images.

    Args:
        size_px: Height and width of an image.
        count: Images per epoch.
        is_fixed: Whether an index is always the same image. Otherwise it depends on the key, so on the epoch.
    """

    def __init__(self, size_px: int, count: int, *, is_fixed: bool) -> None:
        self._size_px, self._count, self._is_fixed = size_px, count, is_fixed

    def __len__(self) -> int:
        return self._count

    def example(self, index: int, key: int) -> Example:
        """Draw an image, and return it with its people."""
        drawing = self._draw(index, key)
        return Example(drawing.rgb, drawing.joints)

    def ground_truth(self, index: int) -> dict[str, Any]:
        """Return the ground truth of an image in COCO's format."""
        drawing = self._draw(index, 0)
        return describe(drawing, picture_id=index + 1)

    def _draw(self, index: int, key: int) -> Drawing:
        return draw_synthetic_image(self._size_px, make_key(EVAL, index) if self._is_fixed else key)


def with_people(parts: Parts, config: Config) -> Parts:
    """Return the parts of the pose recipe with synthetic people in place of files."""
    data = config.data
    fresh, fixed = (
        SyntheticPeople(data.size_px, count or 0, is_fixed=is_fixed)
        for count, is_fixed in ((data.num_train, False), (data.num_eval, True))
    )
    return replace(
        parts,
        train_data=partial(TrainImages, fresh, data, channels_last=config.channels_last),
        eval_data=partial(EvalImages, fixed),
    )


def write_coco(root: Path, num_train: int, num_eval: int, size_px: int) -> None:
    """Write images of people and their keypoints in COCO's layout."""
    for split, (name, count) in enumerate((("train2017", num_train), ("val2017", num_eval))):
        folder = root / "images" / name
        folder.mkdir(parents=True)
        images, people = [], []
        for picture_id in range(1, count + 1):
            drawing = draw_synthetic_image(size_px, make_key(EVAL, split, picture_id))
            truth = describe(drawing, picture_id)
            Image.fromarray(drawing.rgb).save(folder / truth["file_name"])
            images.append({"id": picture_id, **{key: truth[key] for key in ("file_name", "width", "height")}})
            people.extend(truth["annotations"])
        category = {"id": 1, "name": "person", "keypoints": list(COCO.joints)}
        path = root / "annotations" / f"person_keypoints_{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"images": images, "annotations": people, "categories": [category]}))


def describe(drawing: Drawing, picture_id: int) -> dict[str, Any]:
    """Return the annotations of a drawing in COCO's format. The ids of its people start at picture_id * 100."""
    people = []
    for number, (joints, box) in enumerate(zip(drawing.joints, drawing.boxes, strict=True)):
        people.append(
            {
                "id": picture_id * 100 + number,
                "image_id": picture_id,
                "category_id": 1,
                "iscrowd": 0,
                "keypoints": [round(value, 2) for value in joints.reshape(-1).tolist()],
                "num_keypoints": int((joints[:, 2] > 0).sum()),
                "bbox": [float(value) for value in box],
                "area": float((drawing.owners == number + 1).sum()),
            }
        )
    height, width = drawing.owners.shape
    return {
        "image_id": picture_id, "file_name": f"{picture_id:012d}.jpg", "width": width, "height": height,
        "crowd_index": None, "annotations": people,
    }  # fmt: skip


def draw_synthetic_image(size_px: int, key: int) -> Drawing:
    """Draw up to four people of different sizes with little overlap.

    Args:
        size_px: Height and width of the image.
        key: Seed of all random numbers.
    """
    random = np.random.default_rng(key)
    image = _background(size_px, random)
    owners = Image.new("L", image.size)
    people: list[Floats] = []
    count = 1 + int(random.integers(MAX_PEOPLE))
    heights = (
        np.sort(random.uniform(MIN_SHARE, MAX_SHARE, count)) * size_px
    )  # larger people are in front, so drawn last
    for height in heights.tolist():
        joints = _pose(random) * height
        taken = [_bounds(other) for other in people]
        center = _free_position(joints, taken, size_px, random)
        if center is None:
            continue
        people.append(joints + center)
        canvases = [ImageDraw.Draw(image), ImageDraw.Draw(owners)]
        Painter(canvases, people[-1], height, random).paint(owner=len(people))
    owner_map = np.asarray(owners)
    placed = [_with_visibility(joints, owner_map, person + 1) for person, joints in enumerate(people)]
    noise = random.integers(-12, 13, (size_px, size_px, 1), dtype=np.int16)
    rgb = np.clip(np.asarray(image).astype(np.int16) + noise, 0, 255).astype(np.uint8)
    return Drawing(rgb, np.array(placed).reshape(-1, COCO.num_joints, 3), owner_map)


def _background(size_px: int, random: np.random.Generator) -> Image.Image:
    """Draw a gradient with random shapes on it."""
    corners = random.integers(40, 216, (2, 2, 3)).astype(np.uint8)
    image = Image.fromarray(corners).resize((size_px, size_px), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(image)
    for _ in range(int(random.integers(8, 20))):
        x, y = random.uniform(-0.1, 1.1, 2) * size_px
        wide, high = random.uniform(0.02, 0.3, 2) * size_px
        color = random_color(random)
        kind = random.integers(3)
        if kind == 0:
            draw.rectangle((x, y, x + wide, y + high), fill=color)
        elif kind == 1:
            draw.ellipse((x, y, x + wide, y + high), fill=color)
        else:
            end = (x + (random.random() * 2 - 1) * 0.3 * size_px, y + high)
            draw.line((x, y, *end), fill=color, width=int(1 + random.uniform(0, 0.05) * size_px))
    return image


def _pose(random: np.random.Generator) -> Floats:
    """Draw (17, 2) joints of a person of height 1, relative to the middle of the hips; y points down."""
    spots: dict[str, Floats] = {}
    shoulder, hip = random.uniform(0.10, 0.13), random.uniform(0.06, 0.08)
    torso = random.uniform(0.26, 0.32)
    head = np.array([random.uniform(-0.015, 0.015), -torso - 0.17])
    turn = random.uniform(-0.025, 0.025)  # of the face, to one side
    spots["nose"] = head + np.array([turn, 0.025])
    # The left side of a person is on the right of the image.
    for side, sign in (("left", 1), ("right", -1)):
        spots[f"{side}_eye"] = head + np.array([turn + sign * 0.042, -0.025])
        spots[f"{side}_ear"] = head + np.array([sign * 0.1 + turn / 2, 0.005])
        spots[f"{side}_shoulder"] = np.array([sign * shoulder, -torso])
        spots[f"{side}_hip"] = np.array([sign * hip, 0.0])
        raised, bent = random.uniform(-0.2, 2.4), random.uniform(-0.4, 1.8)
        spots[f"{side}_elbow"] = spots[f"{side}_shoulder"] + _limb(0.15, raised, sign)
        spots[f"{side}_wrist"] = spots[f"{side}_elbow"] + _limb(0.14, raised + bent, sign)
        spread, knee = random.uniform(-0.1, 0.6), random.uniform(-0.5, 0.2)
        spots[f"{side}_knee"] = spots[f"{side}_hip"] + _limb(0.22, spread, sign)
        spots[f"{side}_ankle"] = spots[f"{side}_knee"] + _limb(0.21, spread + knee, sign)
    joints = np.array([spots[name] for name in COCO.joints])
    lean = random.uniform(-0.3, 0.3)
    cos, sin = math.cos(lean), math.sin(lean)
    leaning: Floats = joints @ np.array([[cos, sin], [-sin, cos]])
    return leaning


def _limb(length: float, angle: float, sign: int) -> Floats:
    """Return the vector of a limb: down at angle 0, outwards at a quarter turn."""
    return np.array([sign * math.sin(angle), math.cos(angle)]) * length


def _bounds(joints: Floats) -> Floats:
    """Return left, top, right, bottom."""
    return np.concatenate([joints.min(axis=0), joints.max(axis=0)])


def _free_position(joints: Floats, taken: Sequence[Floats], size_px: int, random: np.random.Generator) -> Floats | None:
    """Find a position of a person with little overlap; None if there is none."""
    left, top, right, bottom = _bounds(joints).tolist()
    for _ in range(40):
        # A small part of a person may be outside of the image.
        margin = 0.03 * size_px
        low = np.array([-left - margin, -top])
        high = np.array([size_px - right + margin, size_px - bottom + margin])
        center: Floats = low + random.random(2) * (high - low)
        mine = _bounds(joints + center)
        if all(_overlap(mine, other) < 0.2 for other in taken):
            return center
    return None


def _overlap(first: Floats, second: Floats) -> float:
    """Return the area of the intersection divided by the area of the smaller box."""
    shared = np.clip(np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2]), 0, None).prod()
    smaller = min((first[2:] - first[:2]).prod(), (second[2:] - second[:2]).prod())
    return float(shared / smaller)


def _with_visibility(joints: Floats, owners: ByteArray, owner: int) -> Floats:
    """Add the visibility to (17, 2) joints: (17, 3). Joints outside are all zeros, as in COCO's files."""
    size = owners.shape[0]
    spots = np.round(joints).astype(np.int64)
    inside = ((spots >= 0) & (spots < size)).all(axis=1)
    spots = np.clip(spots, 0, size - 1)
    seen = np.where(owners[spots[:, 1], spots[:, 0]] == owner, VISIBLE, OCCLUDED) * inside
    return np.column_stack([joints * inside[:, None], seen]).astype(np.float64)


def _box(is_mine: npt.NDArray[np.bool_]) -> list[float]:
    """Return x, y, width, height of the pixels that are true."""
    rows, columns = np.flatnonzero(is_mine.any(axis=1)), np.flatnonzero(is_mine.any(axis=0))
    if not len(rows):
        return [0.0, 0.0, 0.0, 0.0]
    wide, high = columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1
    return [float(columns[0]), float(rows[0]), float(wide), float(high)]
