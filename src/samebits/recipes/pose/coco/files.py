"""Open the images and annotations of COCO and CrowdPose, in the layouts of their downloads."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from samebits.data.coco.store import Store, decode, open_store
from samebits.errors import DataError
from samebits.recipes.pose.coco.annotations import Annotations, read_annotations
from samebits.recipes.pose.coco.regions import draw_mask
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


class AnnotatedImages:
    """Images of one annotation file.

    Args:
        annotations: The annotations of the file.
        store: The folders or zip files of the images.
        images: Indices of the used images in the file.
        with_masks: Leave crowds and people without keypoints out of the loss. The reference does so on COCO only.
    """

    def __init__(self, annotations: Annotations, store: Store, images: list[int], *, with_masks: bool) -> None:
        self.annotations, self._store, self._images, self._with_masks = annotations, store, images, with_masks
        missing = store.missing([annotations.names[image] for image in images])
        if missing:
            more = f" … and {len(missing) - 3:,} more" if len(missing) > 3 else ""
            raise DataError(
                f"{len(missing):,} of {len(images):,} images are missing in {store.title}",
                given="\n".join(missing[:3]) + more,
                fix="Download them, or set data.root to the folder of the dataset.",
            )

    def __len__(self) -> int:
        return len(self._images)

    @property
    def files(self) -> list[str]:
        """Paths of the images, or of the archive that holds them."""
        place = self._store.title
        if Path(place).is_file():
            return [place]
        return [f"{place}/{self.annotations.names[image]}" for image in self._images]

    def example(self, index: int, key: int) -> Example:
        """Read an image."""
        image, known = self._images[index], self.annotations
        rows = known.rows(image)
        is_person = ~known.is_crowd[rows] | (known.num_keypoints[rows] > 0)
        name = known.names[image]
        width, height = known.sizes[image].tolist()
        return Example(
            rgb=decode(self._store.read(name), f"{self._store.title}/{name}", (width, height)),
            joints=known.keypoints[rows][is_person],
            sizes=known.boxes[rows][is_person, 2:].max(axis=1, initial=0),
            mask=draw_mask(known, image) if self._with_masks else None,
        )

    def ground_truth(self, index: int) -> dict[str, Any]:
        """Return the ground truth of an image."""
        return self.annotations.ground_truth(self._images[index])


class ConcatImages:
    """The concatenation of several sources."""

    def __init__(self, parts: list[AnnotatedImages]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def files(self) -> list[str]:
        """Paths of all images, or of the archives that hold them."""
        return [file for part in self._parts for file in part.files]

    def example(self, index: int, key: int) -> Example:
        """Read an image."""
        part, place = self._find(index)
        return part.example(place, key)

    def ground_truth(self, index: int) -> dict[str, Any]:
        """Return the ground truth of an image."""
        part, place = self._find(index)
        return part.ground_truth(place)

    def _find(self, index: int) -> tuple[AnnotatedImages, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def open_files(config: DataConfig, *, train: bool) -> AnnotatedImages | ConcatImages:
    """Open the images of a split. Training leaves out images without annotations.

    Raises:
        DataError: Files are missing or invalid.
    """
    split = (config.train if train else config.eval) or SPLITS[config.name][0 if train else 1]
    names = split.split("+")
    if config.name == "crowdpose" and names == ["trainval"] and _find(config, "trainval") is None:
        shipped = ["train", "val"]
        names = shipped if any(_find(config, name) for name in shipped) else names
    parts, limit = [], config.num_train if train else config.num_eval
    for name in names:
        path = _annotations(config, name)
        known = read_annotations(path, config.skeleton)
        if not train and config.name == "coco" and known.areas is None and len(known.people_ids):
            raise DataError(
                f"no annotation of split {name} has an area, which COCO's evaluation requires",
                where=f"{path}: annotations",
                fix="Add the area of each person, in pixels.",
            )
        counts = np.diff(known.starts)
        images = np.flatnonzero(counts > 0).tolist() if train else list(range(len(known)))
        if limit is not None:
            images, limit = images[:limit], max(0, limit - len(images))
        folders = [config.root.expanduser() / form.format(name) for form in IMAGE_FOLDERS[config.name]]
        parts.append(AnnotatedImages(known, open_store(folders), images, with_masks=config.name == "coco"))
    if not any(len(part) for part in parts):
        raise DataError(
            f"split {split} of {config.name} has no image" + (" with people" if train else ""),
            where="\n".join(str(_annotations(config, name)) for name in names),
            fix="Set data.train or data.eval to another split.",
        )
    return parts[0] if len(parts) == 1 else ConcatImages(parts)


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
