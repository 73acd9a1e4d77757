"""Images and their regions in a COCO annotation file, as labels of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel

from samebits.data.coco.annotations import (
    Id,
    RegionEntry,
    check_entries,
    check_known,
    check_region,
    check_unique,
    index_coco,
    read_coco,
)
from samebits.data.coco.regions import draw_regions
from samebits.data.coco.store import decode, open_store
from samebits.data.images import ByteArray
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment import masks

BACKGROUND = "background"
_FIX = "Correct the annotation file,\nor start a new run with data.on_error=skip to leave such images out."


def _class_name(name: str) -> str:
    if not (0 < len(name) <= 200 and name.isprintable()):
        raise ValueError("a name of one line")
    return name


class _Category(BaseModel):
    id: Id
    name: Annotated[str, AfterValidator(_class_name)]


class _UncheckedEntry(RegionEntry):
    segmentation: Any = None


class CocoFile:
    """A COCO annotation file, checked field by field.

    Args:
        path: The file.
        is_strict: Whether to refuse a region of a wrong form here. Otherwise `labels` refuses its image.

    Raises:
        DataError: It can't be read, or a field is invalid.
    """

    def __init__(self, path: Path, *, is_strict: bool = True) -> None:
        self.path, self._is_strict = path.expanduser(), is_strict
        content = read_coco(self.path)
        categories = check_entries(content["categories"], _Category, "categories", self.path)
        check_unique(categories, "categories", self.path)
        #: Names of the categories, by their number.
        self.categories = dict(sorted((entry["id"], entry["name"]) for entry in categories))
        try:
            kind = RegionEntry if is_strict else _UncheckedEntry
            regions = check_entries(content["annotations"], kind, "annotations", self.path)
        except DataError as error:
            raise (error.with_slots(fix=_FIX) if "segmentation" in error.what else error) from None
        self._coco = index_coco({"images": content["images"], "annotations": regions, "categories": categories})
        check_known(enumerate(regions), "image_id", self._coco.imgs, self.path)
        check_known(enumerate(regions), "category_id", self._coco.cats, self.path)
        self._images: dict[str, dict[str, Any]] = {image["file_name"]: image for image in content["images"]}
        self.names = sorted(image["file_name"] for image in content["images"])  #: File names of the images, sorted.
        twice = next((name for name, other in pairwise(self.names) if name == other), None)
        if twice is not None:
            raise DataError(f"{twice} is listed twice in {self.path}", fix="Remove one of the entries.")

    def image_path(self, name: str, images: Path | None) -> Path:
        """Return the path of an image in `images`, or else in the folder of the file."""
        return (self.path.parent if images is None else images.expanduser()) / name

    def size(self, name: str) -> tuple[int, int]:
        """Return the (width, height) of an image by its annotation, pixels."""
        image = self._entry(name)
        return image["width"], image["height"]

    def classes_by_name(self, classes: Sequence[str]) -> dict[str, set[str]]:
        """Return which of the classes each image has, by its file name. All have the first, the background."""
        found = {name: {classes[0]} for name in self.names}
        for name, owners in found.items():
            regions = self._coco.imgToAnns.get(self._images[name]["id"], [])
            owners.update(self.categories[region["category_id"]] for region in regions if not region["iscrowd"])
            owners.intersection_update(classes)
        return found

    def labels(self, name: str, classes: Sequence[str]) -> ByteArray:
        """Draw the labels of an image.

        Pixels of crowds, and those that regions of different classes share, are ignored. Categories that are not
        among the classes are background.

        Args:
            name: File name of the image.
            classes: Names of the classes; the first is the background.

        Returns:
            (H, W) bytes: the index of the class, or `IGNORED`.

        Raises:
            DataError: A region does not fit the image.
        """
        image = self._entry(name)
        labels = np.zeros((image["height"], image["width"]), np.uint8)
        crowds: list[dict[str, Any]] = []
        by_class: dict[str, list[dict[str, Any]]] = {}
        for region in self._coco.imgToAnns.get(image["id"], []):
            owner = self.categories[region["category_id"]]
            if not self._is_strict:
                self._check(region)
            if region["iscrowd"]:
                crowds.append(region)
            elif owner in classes[1:]:
                by_class.setdefault(owner, []).append(region)
        for owner, regions in by_class.items():
            inside = draw_regions(self._coco, regions, image["id"])
            labels = np.where(inside, np.where(labels, np.uint8(IGNORED), np.uint8(classes.index(owner))), labels)
        # Last, so that a crowd is ignored where regions of classes cover it.
        labels[draw_regions(self._coco, crowds, image["id"]) > 0] = IGNORED
        return labels

    def _check(self, region: dict[str, Any]) -> None:
        try:
            check_region(region["segmentation"])
        except ValueError as error:
            raise DataError(
                f"annotation {region['id']} has no usable region", where=self.path, cause=error, fix=_FIX
            ) from None

    def _entry(self, name: str) -> dict[str, Any]:
        if name not in self._images:
            raise DataError(
                f"{self.path} has no image {name}",
                cause="it has changed since the start of the run",
                fix="Restore the file, or start a new run.",
            )
        return self._images[name]


class LabeledFile:
    """Images of a COCO file with their labels.

    Args:
        file: The annotation file.
        images: Folder or zip file of the images. None: the folder of the file.
        names: File names of the images to use.
        classes: Names of the classes; the first is the background.

    Raises:
        DataError: Images are missing.
    """

    def __init__(self, file: CocoFile, images: Path | None, names: Sequence[str], classes: Sequence[str]) -> None:
        self._file, self._names, self._classes = file, names, classes
        self._store = open_store([file.path.parent if images is None else images.expanduser()])
        missing = self._store.missing(names)
        if missing:
            raise DataError(
                f"{len(missing):,} of {len(names):,} images are missing in {self._store.title}",
                given=", ".join(missing[:3]) + (" …" if len(missing) > 3 else ""),
                fix="Set data.images to the folder or zip file of the images.",
            )

    def __len__(self) -> int:
        return len(self._names)

    @property
    def files(self) -> list[str]:
        """Paths of the annotation file, and of the images or the archive that holds them."""
        title = self._store.title
        images = [title] if Path(title).is_file() else [f"{title}/{name}" for name in self._names]
        return [str(self._file.path), *images]

    def name(self, index: int) -> str:
        """Return the file name of an image."""
        return self._names[index]

    def read(self, index: int, key: int) -> tuple[ByteArray, ByteArray]:
        """Read an image, (H, W, 3) bytes, and draw its labels, (H, W) bytes.

        Raises:
            DataError: The image cannot be read, has another size than in the file or too many pixels, or a region does
                not fit.
        """
        name = self._names[index]
        width, height = size = self._file.size(name)
        if width * height > masks.MAX_PIXELS:
            raise DataError(
                f"the image {name} is {width}x{height}",
                allowed=f"up to {masks.MAX_PIXELS:,} pixels",
                fix="Resize the image and its regions, or remove it from the annotation file.",
            )
        pixels = decode(self._store.read(name), f"{self._store.title}/{name}", size)
        return pixels, self._file.labels(name, self._classes)
