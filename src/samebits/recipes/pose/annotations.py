"""Annotation files of people in COCO's format, which CrowdPose has too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from faster_coco_eval import COCO
from pydantic import BaseModel, Field, create_model

from samebits.data.coco.annotations import (
    Id,
    IsCrowd,
    Number,
    Size,
    check_entries,
    check_known,
    check_region,
    check_unique,
    index_coco,
    read_coco,
    shown,
    wrong,
)
from samebits.errors import DataError
from samebits.recipes.pose.skeletons import SKELETONS, Skeleton


class _Person(BaseModel):
    id: Id
    image_id: Id
    category_id: Id | None = None
    bbox: tuple[Number, Number, Size, Size]
    area: Size | None = None
    iscrowd: IsCrowd = None
    segmentation: Any = None


def read_annotations(path: Path, skeleton: Skeleton) -> COCO:
    """Read an annotation file.

    Returns:
        The people of the file. Only those that the loss ignores have a region.

    Raises:
        DataError: It can't be read, or a field is wrong. Shows the field and its entry.
    """
    content = read_coco(path)
    category = _person(content["categories"], skeleton, path)
    known = [entry.get("id") for entry in content["categories"] if isinstance(entry, dict)]
    listed = list(enumerate(content["annotations"]))
    check_known([(place, entry) for place, entry in listed if _names_category(entry)], "category_id", known, path)
    places = [place for place, entry in listed if entry.get("category_id") in (None, category)]
    most = skeleton.num_joints
    model = create_model(
        "Person",
        __base__=_Person,
        keypoints=Annotated[list[Number], Field(min_length=3 * most, max_length=3 * most)],
        num_keypoints=Annotated[int, Field(strict=True, ge=0, le=most)],
    )
    chosen = [content["annotations"][place] for place in places]
    people = check_entries(chosen, model, "annotations", path, places)
    check_unique(people, "annotations", path)
    images = {image["id"] for image in content["images"]}
    check_known(zip(places, people, strict=True), "image_id", images, path)
    has_areas = any(person["area"] is not None for person in people)
    for place, person in zip(places, people, strict=True):
        where = f"{path}: annotations[{place}]"
        if has_areas and person["area"] is None:
            raise wrong(person, "area", where, "a number of pixels, as in other annotations", is_missing=True)
        _check_count(person, skeleton, where)
        if not is_hidden(person):
            person["segmentation"] = None  # the regions of all people of COCO take a gigabyte
        elif person["segmentation"]:
            try:
                check_region(person["segmentation"])
            except ValueError as error:
                raise wrong(person, "segmentation", where, str(error), person["segmentation"]) from None
    return index_coco({**content, "annotations": [{**person, "category_id": category} for person in people]})


def is_hidden(person: dict[str, Any]) -> bool:
    """Return whether the loss ignores a person: a crowd, or one without keypoints."""
    return bool(person["iscrowd"]) or person["num_keypoints"] == 0


def _names_category(entry: Any) -> bool:
    return not isinstance(entry, dict) or entry.get("category_id") is not None


def _check_count(person: dict[str, Any], skeleton: Skeleton, where: str) -> None:
    """Check the file's number of joints of a person. CrowdPose counts all joints but head and neck."""
    # A person with num_keypoints = 0 is used neither in training nor in evaluation, whatever its joints are.
    num_visible = sum(visible > 0 for visible in person["keypoints"][2::3])
    count = person["num_keypoints"]
    if skeleton.name != "crowdpose" and (count > 0) != (num_visible > 0):
        raise wrong(person, "num_keypoints", where, f"{num_visible}, as many as its keypoints that are visible", count)


def _person(categories: Sequence[dict[str, Any]], skeleton: Skeleton, path: Path) -> int:
    """Return the number of the category with these joints."""
    categories = [entry if isinstance(entry, dict) else {} for entry in categories]
    people = [entry for entry in categories if entry.get("name") == "person"]
    # Not isinstance, for which True is an int.
    if not people or type(people[0].get("id")) is not int:
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
