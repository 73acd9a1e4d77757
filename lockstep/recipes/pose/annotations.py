"""Annotation files in COCO's form, which CrowdPose has too: read, checked field by field, and laid out in columns.

Legend: N pictures, A annotations (people and crowds), K joints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.data.keyed import IntArray
from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Floats
from lockstep.recipes.pose.fields import Fields, entries_of, is_count, is_name, is_number, is_size, is_whole, read_json
from lockstep.recipes.pose.skeletons import SKELETONS, Skeleton

MAX_PIXELS = 178_956_970


@dataclass(frozen=True)
class Runs:
    """A region as run lengths, column by column: so many pixels outside, so many inside, and so on.

    Attributes:
        counts: The lengths, or COCO's text for them.
        height: Of the picture, pixels.
        width: Of the picture, pixels.
    """

    counts: IntArray | str
    height: int
    width: int


Outlines = list[Floats]  # each x, y, x, y ...
Region = Runs | Outlines


@dataclass(frozen=True)
class Annotations:
    """What is known of some pictures.

    Attributes:
        ids: N picture numbers.
        names: N file names.
        sizes: (N, 2) width and height, pixels.
        crowd_indices: N shares of overlapping people, as CrowdPose has them; None where the file has none.
        starts: (N + 1,) the annotations of picture i are [starts[i], starts[i + 1]), in the order of the file.
        people_ids: (A,) annotation numbers.
        category: The number of the category "person".
        keypoints: (A, K, 3): x, y, visible.
        num_keypoints: (A,) as the file says.
        boxes: (A, 4) x, y, width, height.
        areas: (A,) or None where the file has none.
        is_crowd: (A,).
        regions: Where the annotations lie that no keypoints are learnt from, by their place in A; None where the file
            has only a box.
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

    def rows(self, picture: int) -> slice:
        """The annotations of a picture."""
        return slice(int(self.starts[picture]), int(self.starts[picture + 1]))

    def truth(self, picture: int) -> dict[str, Any]:
        """All that is known of a picture, as an evaluation wants it."""
        people = []
        for row in range(*self.rows(picture).indices(len(self.people_ids))):
            person = {
                "id": int(self.people_ids[row]),
                "image_id": self.ids[picture],
                "category_id": self.category,
                "keypoints": self.keypoints[row].reshape(-1).tolist(),
                "num_keypoints": int(self.num_keypoints[row]),
                "bbox": self.boxes[row].tolist(),
                "iscrowd": int(self.is_crowd[row]),
            }
            people.append(person if self.areas is None else {**person, "area": float(self.areas[row])})
        return {
            "image_id": self.ids[picture],
            "file_name": self.names[picture],
            "width": int(self.sizes[picture, 0]),
            "height": int(self.sizes[picture, 1]),
            "crowd_index": self.crowd_indices[picture],
            "annotations": people,
        }


def read_annotations(path: Path, skeleton: Skeleton) -> Annotations:
    """Read an annotation file.

    Raises:
        DataError: It can't be read, or is not what it claims to be; says which field of which entry.
    """
    content = read_json(path)
    images, entries, categories = (entries_of(content, part, path) for part in ("images", "annotations", "categories"))
    category = _person(categories, skeleton, path)
    picture = Fields(images, "images", path)
    ids = picture.column("id", is_whole, "a whole number")
    names = picture.column("file_name", is_name, "a file name, without .. or a leading /")
    widths, heights = (picture.column(name, is_size, "a whole number of pixels") for name in ("width", "height"))
    picture.unique("id", ids)
    _check_pixels(widths, heights, ids, path)

    entries = [entry for entry in entries if entry.get("category_id", category) == category]
    person = Fields(entries, "annotations", path)
    people_ids = person.column("id", _is_64_bit, "a whole number of 64 bits")
    person.unique("id", people_ids)
    known = {number: place for place, number in enumerate(ids)}
    owners = person.column("image_id", known.__contains__, "the id of one of the file's images")
    count = 3 * skeleton.num_joints
    keypoints = person.numbers("keypoints", count, f"{count} numbers: x, y, visible of each joint")
    boxes = person.numbers("bbox", 4, "4 numbers: x, y, width, height")
    crowds = person.column("iscrowd", lambda value: value in (0, 1, None), "0 or 1")
    counts = person.column("num_keypoints", lambda value: is_count(value) and _is_64_bit(value), "a whole number")
    has_areas = bool(entries) and "area" in entries[0]
    areas = person.column("area", is_number, "a number of pixels") if has_areas else None

    places = np.array([known[owner] for owner in owners], dtype=np.int64)
    order = np.argsort(places, kind="stable")
    is_crowd = np.array([bool(value) for value in crowds], dtype=bool)[order]
    num_keypoints = np.array(counts, dtype=np.int64)[order]
    is_masked = is_crowd | (num_keypoints == 0)
    return Annotations(
        ids=ids,
        names=names,
        sizes=np.array([widths, heights], dtype=np.int64).T.reshape(-1, 2),
        crowd_indices=[entry.get("crowdIndex") for entry in images],
        starts=np.searchsorted(places[order], np.arange(len(ids) + 1)),
        people_ids=np.array(people_ids, dtype=np.int64)[order],
        category=category,
        keypoints=keypoints[order].reshape(-1, skeleton.num_joints, 3),
        num_keypoints=num_keypoints,
        boxes=boxes[order],
        areas=None if areas is None else np.array(areas, dtype=np.float64)[order],
        is_crowd=is_crowd,
        regions={row: _region(entries[order[row]], path) for row in np.flatnonzero(is_masked).tolist()},
    )


def _person(categories: Sequence[dict[str, Any]], skeleton: Skeleton, path: Path) -> int:
    """The number of the category whose joints these are."""
    people = [entry for entry in categories if entry.get("name") == "person"]
    if not people or not is_whole(people[0].get("id")):
        names = ", ".join(str(entry.get("name")) for entry in categories[:8])
        raise DataError(f"{path} has no category person", given=f"categories: {names or 'none'}")
    joints = people[0].get("keypoints")
    if joints is not None and not isinstance(joints, list):
        raise DataError(
            f"the joints in {path} are no list", where=f"{path}: categories, keypoints of person", given=joints
        )
    if joints is not None and tuple(joints) != skeleton.joints:
        others = [other.name for other in SKELETONS.values() if tuple(joints) == other.joints]
        raise DataError(
            f"{path} has other joints than {skeleton.name}: {len(joints)} of them",
            where=f"{path}: categories, keypoints of person",
            expected=f"{skeleton.num_joints}: {skeleton.joints[0]} to {skeleton.joints[-1]}",
            do=f"data.name={others[0]}" if others else None,
        )
    return int(people[0]["id"])


def _is_64_bit(value: Any) -> bool:
    return is_whole(value) and -(2**63) <= value < 2**63


def _check_pixels(widths: Sequence[int], heights: Sequence[int], ids: Sequence[int], path: Path) -> None:
    for width, height, number in zip(widths, heights, ids, strict=True):
        if width * height > MAX_PIXELS:
            raise DataError(
                f"image {number} claims to be {width}x{height}", where=path, expected=f"up to {MAX_PIXELS:,} pixels"
            )


def _region(entry: Mapping[str, Any], path: Path) -> Region | None:
    """As arrays, which take a tenth of the memory."""
    region: Any = entry.get("segmentation")
    if not region:
        return None
    try:
        if isinstance(region, dict):
            counts = region["counts"]
            runs = counts if isinstance(counts, str) else np.array(counts, dtype=np.int64)
            return Runs(runs, height=int(region["size"][0]), width=int(region["size"][1]))
        outlines = [np.array(outline, dtype=np.float64) for outline in region]
        if all(outline.ndim == 1 and len(outline) >= 6 and np.isfinite(outline).all() for outline in outlines):
            return outlines
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        pass
    raise DataError(
        f"the region of annotation {entry['id']} can't be read",
        where=f"{path}: its segmentation",
        expected="polygons of at least three points, of finite numbers, or run lengths with size and counts",
    )
