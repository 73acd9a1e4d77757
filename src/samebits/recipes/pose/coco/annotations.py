"""Annotation files in COCO's form, which CrowdPose has too: read, checked field by field, and laid out in columns.

Legend: N images, A annotations (people and crowds), K joints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samebits.data.coco.fields import (
    LARGEST,
    Fields,
    Floats,
    check_pixels,
    entries_of,
    is_count,
    is_id,
    is_name,
    is_number,
    is_side,
    is_whole,
    read_json,
    shown,
)
from samebits.data.coco.regions import Region, read_region
from samebits.data.image_file import MAX_PIXELS
from samebits.data.keyed import IntArray
from samebits.errors import DataError
from samebits.recipes.pose.skeletons import SKELETONS, Skeleton


@dataclass(frozen=True)
class Annotations:
    """Annotations of N images: A annotations with K joints each.

    Attributes:
        ids: N image numbers.
        names: N file names.
        sizes: (N, 2) width and height, pixels.
        crowd_indices: N shares of overlapping people, as CrowdPose has them; None where the file has none.
        starts: (N + 1,) the annotations of image i are [starts[i], starts[i + 1]), in the order of the file.
        people_ids: (A,) annotation numbers.
        category: The number of the category "person".
        keypoints: (A, K, 3): x, y, visible.
        num_keypoints: (A,) the field of this name in the file.
        boxes: (A, 4) x, y, width, height.
        areas: (A,) or None where the file has none.
        is_crowd: (A,).
        regions: Areas of the annotations that are left out of the loss, by their index in A. None: the file has only a
            box.
    """

    ids: list[int]
    names: list[str]
    sizes: IntArray
    crowd_indices: list[float | None]
    starts: IntArray
    people_ids: IntArray
    category: int
    keypoints: Floats
    num_keypoints: IntArray
    boxes: Floats
    areas: Floats | None
    is_crowd: npt.NDArray[np.bool_]
    regions: Mapping[int, Region | None]

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, image: int) -> slice:
        """Return the rows of the annotations of an image."""
        return slice(int(self.starts[image]), int(self.starts[image + 1]))

    def ground_truth(self, image: int) -> dict[str, Any]:
        """Return the ground truth of an image; `Source.ground_truth` describes it."""
        people = []
        for row in range(*self.rows(image).indices(len(self.people_ids))):
            person = {
                "id": int(self.people_ids[row]),
                "image_id": self.ids[image],
                "category_id": self.category,
                "keypoints": self.keypoints[row].reshape(-1).tolist(),
                "num_keypoints": int(self.num_keypoints[row]),
                "bbox": self.boxes[row].tolist(),
                "iscrowd": int(self.is_crowd[row]),
            }
            people.append(person if self.areas is None else {**person, "area": float(self.areas[row])})
        return {
            "image_id": self.ids[image],
            "file_name": self.names[image],
            "width": int(self.sizes[image, 0]),
            "height": int(self.sizes[image, 1]),
            "crowd_index": self.crowd_indices[image],
            "annotations": people,
        }


def read_annotations(path: Path, skeleton: Skeleton) -> Annotations:
    """Read an annotation file.

    Raises:
        DataError: It can't be read, or a field is invalid. Shows the field and its entry.
    """
    content = read_json(path)
    images, entries, categories = (entries_of(content, part, path) for part in ("images", "annotations", "categories"))
    category = _person(categories, skeleton, path)
    image = Fields(images, "images", path)
    ids = image.column("id", is_id, "a whole number of 64 bits")
    names = image.column("file_name", is_name, "a file name that can be printed, without .. or a leading /")
    sizes = f"a whole number of pixels, up to {MAX_PIXELS:,} in the image"
    widths, heights = (image.column(name, is_side, sizes) for name in ("width", "height"))
    image.unique("id", ids)
    check_pixels(widths, heights, ids, path)
    crowd_indices = image.column("crowdIndex", lambda value: value is None or is_number(value), "a number, or none")

    numbers = [None, *(each.get("id") for each in categories)]
    owned = Fields(entries, "annotations", path).column(
        "category_id", numbers.__contains__, "the id of one of the file's categories"
    )
    chosen = [place for place, number in enumerate(owned) if number in (None, category)]
    entries = [entries[place] for place in chosen]
    person = Fields(entries, "annotations", path, chosen)
    people_ids = person.column("id", is_id, "a whole number of 64 bits")
    person.unique("id", people_ids)
    known = {number: place for place, number in enumerate(ids)}
    owners = person.column("image_id", known.__contains__, "the id of one of the file's images")
    keypoints = person.numbers("keypoints", 3 * skeleton.num_joints, "x, y, visible of each joint")
    boxes = person.numbers("bbox", 4, "x, y, width, height")
    if len(boxes) and boxes[:, 2:].min() < 0:
        raise person.wrong(int(boxes[:, 2:].min(axis=1).argmin()), "bbox", "a width and a height from 0")
    crowds = person.column("iscrowd", lambda value: value in (0, 1, None), "0 or 1")
    counts = _counts(person, keypoints, skeleton)
    area = f"a number of pixels, from 0 to {LARGEST:,.0f}"
    has_areas = any("area" in entry for entry in entries)
    areas = person.column("area", lambda value: is_number(value) and value >= 0, area) if has_areas else None

    places = np.array([known[owner] for owner in owners], dtype=np.int64)
    order = np.argsort(places, kind="stable")
    is_crowd = np.array([bool(value) for value in crowds], dtype=bool)[order]
    num_keypoints = counts[order]
    is_masked = is_crowd | (num_keypoints == 0)
    return Annotations(
        ids=ids,
        names=names,
        sizes=np.array([widths, heights], dtype=np.int64).T.reshape(-1, 2),
        crowd_indices=crowd_indices,
        starts=np.searchsorted(places[order], np.arange(len(ids) + 1)),
        people_ids=np.array(people_ids, dtype=np.int64)[order],
        category=category,
        keypoints=keypoints[order].reshape(-1, skeleton.num_joints, 3),
        num_keypoints=num_keypoints,
        boxes=boxes[order],
        areas=None if areas is None else np.array(areas, dtype=np.float64)[order],
        is_crowd=is_crowd,
        regions={row: read_region(person, int(order[row])) for row in np.flatnonzero(is_masked).tolist()},
    )


def _counts(person: Fields, keypoints: Floats, skeleton: Skeleton) -> IntArray:
    """Return (A,) the file's number of joints of each person, after checking it."""
    most = skeleton.num_joints
    counts = person.column("num_keypoints", lambda value: is_count(value) and value <= most, f"from 0 to {most}")
    array = np.array(counts, dtype=np.int64)
    if skeleton.name == "crowdpose":
        return array  # it counts all joints but head and neck
    # A person with num_keypoints = 0 is used neither in training nor in evaluation, whatever its joints are.
    num_visible = (keypoints.reshape(-1, most, 3)[:, :, 2] > 0).sum(axis=1)
    wrong = np.flatnonzero((array > 0) != (num_visible > 0))
    if len(wrong):
        place = int(wrong[0])
        raise person.wrong(place, "num_keypoints", f"{num_visible[place]}, as many as its keypoints that are visible")
    return array


def _person(categories: Sequence[dict[str, Any]], skeleton: Skeleton, path: Path) -> int:
    """Return the number of the category with these joints."""
    people = [entry for entry in categories if entry.get("name") == "person"]
    if not people or not is_whole(people[0].get("id")):
        names = ", ".join(shown(entry.get("name")) for entry in categories[:8])
        raise DataError(
            f"{path} has no category person",
            given=f"categories: {names or 'none'}",
            fix="Use an annotation file of person keypoints.",
        )
    joints = people[0].get("keypoints")
    if joints is not None and not isinstance(joints, list):
        raise DataError(
            f"the joints in {path} are not a list",
            given=shown(joints),
            where=f"{path}: categories, keypoints of person",
            fix="Correct the keypoints of the category person.",
        )
    if joints is not None and tuple(joints) != skeleton.joints:
        others = [other.name for other in SKELETONS.values() if tuple(joints) == other.joints]
        raise DataError(
            f"{path} has other joints than {skeleton.name}: {len(joints)} of them",
            where=f"{path}: categories, keypoints of person",
            allowed=f"{skeleton.num_joints}: {skeleton.joints[0]} to {skeleton.joints[-1]}",
            fix=f"Set data.name={others[0]}." if others else "Use an annotation file of the dataset data.name.",
        )
    return int(people[0]["id"])
