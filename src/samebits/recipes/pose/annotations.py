"""Annotation files of people in COCO's format, which CrowdPose has too."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from faster_coco_eval import COCO
from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, create_model

from samebits.data.coco.annotations import (
    Id,
    IsCrowd,
    Number,
    Reference,
    Size,
    check_entries,
    check_region,
    index_coco,
    read_coco,
    shown,
    wrong,
)
from samebits.errors import DataError
from samebits.recipes.pose.skeletons import SKELETONS, Skeleton


class _Entry(BaseModel):
    id: Id
    image_id: Reference
    category_id: Reference | None = None
    bbox: tuple[Number, Number, Size, Size]
    area: Size | None = None
    iscrowd: IsCrowd = None


def _person_model(skeleton: Skeleton) -> type[BaseModel]:
    most = skeleton.num_joints

    def check_count(count: int, info: ValidationInfo) -> int:
        num_visible = sum(visible > 0 for visible in info.data.get("keypoints", ())[2::3])
        # A person with num_keypoints = 0 is used neither in training nor in evaluation, whatever its joints are.
        # CrowdPose counts all joints but head and neck.
        if skeleton.name != "crowdpose" and (count > 0) != (num_visible > 0):
            raise ValueError(f"{num_visible}, as many as its keypoints that are visible")
        return count

    def keep_hidden(region: Any, info: ValidationInfo) -> Any:
        if not is_hidden(info.data):
            return None  # the regions of all people of COCO take a gigabyte
        return check_region(region) if region else None

    return create_model(
        "Person",
        __base__=_Entry,
        keypoints=Annotated[list[Number], Field(min_length=3 * most, max_length=3 * most)],
        num_keypoints=Annotated[int, Field(strict=True, ge=0, le=most), AfterValidator(check_count)],
        segmentation=(Annotated[Any, AfterValidator(keep_hidden)], None),
    )


def read_annotations(path: Path, skeleton: Skeleton) -> COCO:
    """Read an annotation file.

    Returns:
        The people of the file. Only those that the loss ignores have a region.

    Raises:
        DataError: It can't be read, or a field is wrong. Shows the field and its entry.
    """
    content = read_coco(path)
    category = _person(content["categories"], skeleton, path)
    ids = [each.get("id") for each in content["categories"] if isinstance(each, dict)]
    others, listed = [each for each in ids if each not in (category, None)], content["annotations"]
    places = [i for i, each in enumerate(listed) if not (isinstance(each, dict) and each.get("category_id") in others)]
    known = {"image_id": {image["id"] for image in content["images"]}, "category_id": [category]}
    chosen = [listed[place] for place in places]
    people = check_entries(chosen, _person_model(skeleton), "annotations", path, places=places, known=known)
    without = [place for place, person in enumerate(people) if person["area"] is None]
    if without and len(without) < len(people):
        place = f"{path}: annotations[{places[without[0]]}]"
        raise wrong(people[without[0]], "area", place, "a number of pixels, as in other annotations")
    return index_coco({**content, "annotations": [{**person, "category_id": category} for person in people]})


def is_hidden(person: Mapping[str, Any]) -> bool:
    """Return whether the loss ignores a person: a crowd, or one without keypoints."""
    return bool(person.get("iscrowd")) or person.get("num_keypoints") == 0


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
