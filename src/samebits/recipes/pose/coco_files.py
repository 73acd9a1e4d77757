"""Open the images and annotations of COCO and CrowdPose, in the layouts of their downloads."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from faster_coco_eval import COCO

from samebits.data.coco.regions import draw_regions
from samebits.data.coco.store import Folder, open_store
from samebits.errors import DataError
from samebits.recipes.pose.annotations import is_hidden, read_annotations
from samebits.recipes.pose.config import SPLITS, DataConfig
from samebits.recipes.pose.data import Example

# Possible paths of the annotations and images of a split below the root, the usual one first.
ANNOTATIONS = {
    "coco": ("annotations/person_keypoints_{}.json", "person_keypoints_{}.json"),
    "crowdpose": ("json/crowdpose_{}.json", "annotations/crowdpose_{}.json", "crowdpose_{}.json"),
}
IMAGE_FOLDERS = {
    "coco": ("images/{}", "{}", "images/{}.zip", "{}.zip"),
    "crowdpose": ("images", "images.zip"),
}


class _Image(NamedTuple):
    """An image of a split."""

    coco: COCO  # the annotation file
    store: Folder  # the folder or zip file
    entry: dict[str, Any]


class AnnotatedImages:
    """The images of one or several splits.

    Args:
        with_masks: Leave crowds and people without keypoints out of the loss. The reference does so on COCO only.
    """

    def __init__(self, images: list[_Image], num_joints: int, *, with_masks: bool) -> None:
        self._images, self._num_joints, self._with_masks = images, num_joints, with_masks

    def __len__(self) -> int:
        return len(self._images)

    @property
    def files(self) -> list[str]:
        """Paths of the images, or of the archives that hold them."""
        # A dict, since an archive holds many of them.
        return list(
            dict.fromkeys(file for _, store, image in self._images for file in store.files([image["file_name"]]))
        )

    def example(self, index: int, key: int) -> Example:
        """Read an image."""
        coco, store, image = self._images[index]
        people = coco.imgToAnns.get(image["id"], [])
        hidden = [person for person in people if is_hidden(person)] if self._with_masks else []
        shown = [person for person in people if not person["iscrowd"] or person["num_keypoints"]]
        joints = np.array([person["keypoints"] for person in shown], np.float64)
        return Example(
            rgb=store.pixels(image["file_name"], (image["width"], image["height"])),
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
        images = [image for image in coco.dataset["images"] if not train or image["id"] in coco.imgToAnns]
        images = images[: None if limit is None else limit - len(found)]
        folders = [config.root.expanduser() / form.format(name) for form in IMAGE_FOLDERS[config.name]]
        fix = "Download them, or set data.root to the folder of the dataset."
        store = open_store(folders, [image["file_name"] for image in images], fix)
        found += [_Image(coco, store, image) for image in images]
    if not found:
        raise DataError(
            f"split {split} of {config.name} has no image" + (" with people" if train else ""),
            where="\n".join(str(_annotations(config, name)) for name in names),
            fix="Set data.train or data.eval to another split.",
        )
    return AnnotatedImages(found, config.skeleton.num_joints, with_masks=config.name == "coco")


def split_names(config: DataConfig, *, train: bool) -> list[str]:
    """Return the names of the training or validation splits."""
    return ((config.train if train else config.eval) or SPLITS[config.name][0 if train else 1]).split("+")


def _find(config: DataConfig, name: str) -> Path | None:
    root = config.root.expanduser()
    candidates = [root / form.format(name) for form in ANNOTATIONS[config.name]]
    return next((path for path in candidates if path.is_file()), None)


def _annotations(config: DataConfig, name: str) -> Path:
    path = _find(config, name)
    if path is not None:
        return path
    root = config.root.expanduser()
    beside = sorted({file.name for form in ANNOTATIONS[config.name] for file in (root / form).parent.glob("*.json")})
    raise DataError(
        f"there are no annotations of split {name} of {config.name}",
        given=f"data.root={config.root}" + ("" if root.is_dir() else ", which is not a folder"),
        allowed="\n".join(str(root / form.format(name)) for form in ANNOTATIONS[config.name]),
        cause=f"there are only {', '.join(beside[:6])}" if beside else None,
        fix="Set data.root to the folder of the dataset, and data.train and data.eval to its splits.",
    )
