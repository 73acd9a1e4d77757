"""Open the images and annotations of COCO and CrowdPose, in the layouts of their downloads."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from faster_coco_eval import COCO
from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, create_model

from samebits.data.coco import (
    FIX,
    Folder,
    Id,
    IsCrowd,
    Number,
    Reference,
    Size,
    check_entries,
    check_region,
    draw_regions,
    index_coco,
    open_folder,
    read_coco,
    shown,
)
from samebits.errors import DataError
from samebits.recipes.pose.config import SPLITS, DataConfig
from samebits.recipes.pose.data import Example
from samebits.recipes.pose.skeletons import SKELETONS, Skeleton
from samebits.recipes.pose.view import check_shape

# Annotation files of people in COCO's format, which CrowdPose has too.


LOGGER = logging.getLogger("samebits")


class _Entry(BaseModel):
    id: Id
    image_id: Reference
    category_id: Reference | None = None
    bbox: tuple[Number, Number, Size, Size]
    area: Size | None = None
    iscrowd: IsCrowd = None


class _Category(BaseModel):
    id: Id
    name: Any = None
    keypoints: Any = None


_MAX_OUTSIDE = 0.2  # of the keypoints: cut people have some; coordinates of another image size most


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
        num_keypoints=Annotated[
            int, Field(strict=True, ge=0, le=most), AfterValidator(check_count)
        ],
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
    categories = check_entries(content["categories"], _Category, "categories", path, unique=False)
    category = _person(categories, skeleton, path)
    others = [each["id"] for each in categories if each["id"] != category]
    known = {"image_id": {image["id"] for image in content["images"]}, "category_id": [category]}
    people = check_entries(
        content["annotations"],
        _person_model(skeleton),
        "annotations",
        path,
        known=known,
        leave_out=others,
    )
    without = [person for person in people if person["area"] is None]
    if without and len(without) < len(people):
        raise DataError(
            f"annotation {without[0]['id']} has no area",
            where=path,
            allowed="a number of pixels, as in other annotations",
            fix=FIX,
        )
    coco = index_coco(
        {**content, "annotations": [{**person, "category_id": category} for person in people]}
    )
    _check_places(coco, path)
    return coco


def _check_places(coco: COCO, path: Path) -> None:
    """Check that keypoints are pixels of their images: no position would be learned from others."""
    num_points = num_outside = 0
    are_fractions = True
    where = ""
    for person in coco.anns.values():
        image = coco.imgs[person["image_id"]]
        size = image["width"], image["height"]
        points = np.array(person["keypoints"]).reshape(-1, 3)
        points = points[points[:, 2] > 0, :2]
        outside = points[((points < -1) | (points > np.add(size, 1))).any(axis=1)]
        num_points += len(points)
        num_outside += len(outside)
        are_fractions &= bool(((points >= 0) & (points <= 1)).all())
        if len(outside) and not where:
            x, y = outside[0]
            where = f"annotation {person['id']}: x={x:g}, y={y:g} in {size[0]}x{size[1]}"
    if num_points and (are_fractions or num_outside > _MAX_OUTSIDE * num_points):
        raise DataError(
            f"the keypoints in {path} are not in pixels of the images"
            if are_fractions
            else f"{num_outside:,} of {num_points:,} keypoints in {path} lie outside of their images",
            given="no coordinate above 1" if are_fractions else where,
            cause="They are fractions of the image."
            if are_fractions
            else "The images were resized, or are other ones.",
            fix="Write coordinates in pixels of the images.",
        )


def is_hidden(person: Mapping[str, Any]) -> bool:
    """Return whether the loss ignores a person: a crowd, or one without keypoints."""
    return bool(person.get("iscrowd")) or person.get("num_keypoints") == 0


def _person(categories: Sequence[dict[str, Any]], skeleton: Skeleton, path: Path) -> int:
    """Return the number of the category with these joints."""
    people = [entry for entry in categories if entry["name"] == "person"]
    if not people:
        names = ", ".join(shown(entry["name"]) for entry in categories[:8])
        raise DataError(
            f"{path} has no category person",
            given=f"categories: {names or 'none'}",
            fix="Use an annotation file of person keypoints.",
        )
    joints = people[0]["keypoints"]
    if joints is None:
        order = f"taken as {skeleton.joints[0]}, {skeleton.joints[1]}, ... {skeleton.joints[-1]}"
        LOGGER.warning(
            "%s: the category person does not name its keypoints, which are %s", path, order
        )
    elif joints != list(skeleton.joints):
        others = [other.name for other in SKELETONS.values() if joints == list(other.joints)]
        raise DataError(
            f"{path} has other joints than {skeleton.name}",
            given=shown(joints),
            where=f"{path}: categories, keypoints of person",
            allowed=f"a list of {skeleton.num_joints}: {skeleton.joints[0]} to {skeleton.joints[-1]}",
            fix=f"Set data.name={others[0]}."
            if others
            else "Use an annotation file of the dataset data.name.",
        )
    number: int = people[0]["id"]
    return number


# Possible paths of the annotations and images of a split below the root, the usual one first.
ANNOTATIONS = {
    "coco": ("annotations/person_keypoints_{}.json", "person_keypoints_{}.json"),
    "crowdpose": ("json/crowdpose_{}.json", "annotations/crowdpose_{}.json", "crowdpose_{}.json"),
}
IMAGE_FOLDERS = {
    "coco": ("images/{}", "{}"),
    "crowdpose": ("images",),
}


class _Image(NamedTuple):
    """An image of a split."""

    coco: COCO  # the annotation file
    folder: Folder
    entry: dict[str, Any]


class AnnotatedImages:
    """The images of one or several splits.

    Args:
        with_masks: Leave crowds and people without keypoints out of the loss. The reference does so on COCO only.
    """

    def __init__(self, images: list[_Image], num_joints: int, *, with_masks: bool) -> None:
        self._images = images
        self._num_joints = num_joints
        self._with_masks = with_masks

    def __len__(self) -> int:
        return len(self._images)

    @property
    def files(self) -> list[str]:
        """Paths of the images."""
        return [f"{folder.path}/{image['file_name']}" for _, folder, image in self._images]

    def example(self, index: int, key: int) -> Example:
        """Read an image."""
        coco, folder, image = self._images[index]
        people = coco.imgToAnns.get(image["id"], [])
        hidden = [person for person in people if is_hidden(person)] if self._with_masks else []
        shown = [person for person in people if not person["iscrowd"] or person["num_keypoints"]]
        joints = np.array([person["keypoints"] for person in shown], np.float64)
        return Example(
            rgb=folder.pixels(image["file_name"], (image["width"], image["height"])),
            joints=joints.reshape(-1, self._num_joints, 3),
            # 0 becomes 255, and 1, in crowds and on people without keypoints, becomes 0.
            mask=draw_regions(coco, hidden, image["id"]) - np.uint8(1) if hidden else None,
        )

    def ground_truth(self, index: int) -> dict[str, Any]:
        """Return the ground truth of an image."""
        coco, _, image = self._images[index]
        people = []
        for found in coco.imgToAnns.get(image["id"], []):
            person = {**found, "bbox": list(found["bbox"]), "iscrowd": int(found["iscrowd"] or 0)}
            # No metric reads it, and the targets of all images are kept until the end of the evaluation.
            del person["segmentation"]
            if person["area"] is None:
                del person["area"]
            people.append(person)
        return {
            "image_id": image["id"],
            **{name: image[name] for name in ("file_name", "width", "height")},
            "crowd_index": image["crowdIndex"],
            "annotations": people,
        }


def open_files(config: DataConfig, *, train: bool) -> AnnotatedImages:
    """Open the images of a split. Training leaves out images without annotations.

    Raises:
        DataError: Files are missing or invalid.
    """
    names = split_names(config, train=train)
    split = "+".join(names)
    if config.name == "crowdpose" and names == ["trainval"] and _find(config, "trainval") is None:
        shipped = ["train", "val"]
        names = shipped if any(_find(config, name) for name in shipped) else names
    found: list[_Image] = []
    limit = config.num_train if train else config.num_eval
    for name in names:
        path = _annotations(config, name)
        coco = read_annotations(path, config.skeleton)
        lacks_area = any(person["area"] is None for person in coco.anns.values())
        if not train and config.name == "coco" and lacks_area:
            raise DataError(
                f"no annotation of split {name} has an area, which COCO's evaluation requires",
                where=f"{path}: annotations",
                fix="Add the area of each person, in pixels.",
            )
        images = [
            image for image in coco.dataset["images"] if not train or image["id"] in coco.imgToAnns
        ]
        images = images[: None if limit is None else limit - len(found)]
        folders = [
            config.root.expanduser() / form.format(name) for form in IMAGE_FOLDERS[config.name]
        ]
        fix = "Download them, or set data.root to the folder of the dataset."
        folder = open_folder(folders, [image["file_name"] for image in images], fix)
        sizes = {image["file_name"]: (image["width"], image["height"]) for image in images}
        folder.check_sizes(sizes)
        for image in () if train else images:
            check_shape(f"image {image['id']}", image["width"], image["height"])
        found += [_Image(coco, folder, image) for image in images]
    if not found:
        raise DataError(
            f"split {split} of {config.name} has no image" + (" with people" if train else ""),
            where="\n".join(str(_annotations(config, name)) for name in names),
            fix="Set data.train or data.eval to another split.",
        )
    return AnnotatedImages(found, config.skeleton.num_joints, with_masks=config.name == "coco")


def split_names(config: DataConfig, *, train: bool) -> list[str]:
    """Return the names of the training or validation splits."""
    return (
        (config.train if train else config.eval) or SPLITS[config.name][0 if train else 1]
    ).split("+")


def _find(config: DataConfig, name: str) -> Path | None:
    root = config.root.expanduser()
    candidates = [root / form.format(name) for form in ANNOTATIONS[config.name]]
    return next((path for path in candidates if path.is_file()), None)


def _annotations(config: DataConfig, name: str) -> Path:
    path = _find(config, name)
    if path is not None:
        return path
    root = config.root.expanduser()
    beside = sorted(
        {
            file.name
            for form in ANNOTATIONS[config.name]
            for file in (root / form).parent.glob("*.json")
        }
    )
    raise DataError(
        f"there are no annotations of split {name} of {config.name}",
        given=f"data.root={config.root}" + ("" if root.is_dir() else ", which is not a folder"),
        allowed="\n".join(str(root / form.format(name)) for form in ANNOTATIONS[config.name]),
        cause=f"there are only {', '.join(beside[:6])}" if beside else None,
        fix="Set data.root to the folder of the dataset, and data.train and data.eval to its splits.",
    )
