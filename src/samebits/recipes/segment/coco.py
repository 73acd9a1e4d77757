"""Images and their regions in a COCO annotation file, as labels of pixels."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel

from samebits.data.coco.annotations import Id, RegionEntry, check_entries, index_coco, read_coco
from samebits.data.coco.regions import draw_regions
from samebits.data.coco.store import Folder, open_store
from samebits.data.images import ByteArray
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment.config import MAX_PIXELS, DataConfig
from samebits.recipes.segment.data import LabelSource

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

    With data.on_error=skip a region of a wrong form is not refused here, but when its image is read.

    Attributes:
        categories: Names of the categories, by their number.
        names: File names of the images, sorted.
        num_without_mask: 0, and `left_out` is empty: both are for folders of masks.

    Raises:
        DataError: It can't be read, or a field is invalid.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        self.path, self.num_without_mask, self.left_out = path.expanduser(), 0, Counter[str]()
        self._folder = self.path.parent if config.images is None else config.images.expanduser()
        content = read_coco(self.path)
        categories = check_entries(content["categories"], _Category, "categories", self.path)
        self.categories: dict[int, str] = dict(sorted((entry["id"], entry["name"]) for entry in categories))
        ids = {image["id"] for image in content["images"]}
        known = {"image_id": ids, "category_id": self.categories}
        kind = RegionEntry if config.on_error == "stop" else _UncheckedEntry
        try:
            # Some tools number all regions 0.
            regions = check_entries(content["annotations"], kind, "annotations", self.path, known=known, unique=False)
        except DataError as error:
            raise (error.with_slots(fix=_FIX) if "segmentation" in error.what else error) from None
        self._coco = index_coco({"images": content["images"], "annotations": regions, "categories": categories})
        self._images: dict[str, dict[str, Any]] = {image["file_name"]: image for image in content["images"]}
        self.names = sorted(image["file_name"] for image in content["images"])
        twice = next((name for name, other in pairwise(self.names) if name == other), None)
        if twice is not None:
            raise DataError(f"{twice} is listed twice in {self.path}", fix="Remove one of the entries.")

    def image_path(self, name: str) -> Path:
        """Return the path of an image."""
        return self._folder / name

    def classes_by_name(self, classes: Sequence[str]) -> dict[str, set[str]]:
        """Return which of the classes each image has, by its file name. All have the first, the background."""
        found = {name: {classes[0]} for name in self.names}
        for name, owners in found.items():
            regions = self._coco.imgToAnns.get(self._images[name]["id"], [])
            owners.update(self.categories[region["category_id"]] for region in regions if not region["iscrowd"])
            owners.intersection_update(classes)
        return found

    def opened(self, names: Sequence[str], info: Mapping[str, Any]) -> LabelSource:
        """Return images with their labels.

        Pixels of crowds, and those that regions of different classes share, are ignored. Categories that are not
        among the classes are background. To read an image raises DataError if it cannot be read, has another size than
        in the file or too many pixels, or if a region does not fit.

        Args:
            info: `classes`: names of the classes; the first is the background.

        Raises:
            DataError: Images are missing.
        """
        store = open_store([self._folder], names, "Set data.images to the folder or zip file of the images.")
        read = partial(self._read, store=store, classes=info["classes"])
        return LabelSource(names, read, [str(self.path), *store.files(names)])

    def reader(self, names: Sequence[str]) -> Callable[[str], object]:
        """Return a function that reads an image and the regions of all categories, to find unreadable ones."""
        source = self.opened(names, {"classes": [BACKGROUND, *self.categories.values()]})
        return lambda name: source.read_name(name, 0)

    def _read(self, name: str, _key: int, *, store: Folder, classes: Sequence[str]) -> tuple[ByteArray, ByteArray]:
        if name not in self._images:
            raise DataError(
                f"{self.path} has no image {name}",
                cause="it has changed since the start of the run",
                fix="Restore the file, or start a new run.",
            )
        image = self._images[name]
        width, height = image["width"], image["height"]
        if width * height > MAX_PIXELS:
            raise DataError(
                f"the image {name} is {width}x{height}",
                allowed=f"up to {MAX_PIXELS:,} pixels",
                fix="Resize the image and its regions, or remove it from the annotation file.",
            )
        return store.pixels(name, (width, height)), self._labels(image, classes)

    def _labels(self, image: Mapping[str, Any], classes: Sequence[str]) -> ByteArray:
        """Draw the labels of an image: (H, W) bytes, the index of the class, or `IGNORED`."""
        labels = np.zeros((image["height"], image["width"]), np.uint8)
        crowds: list[dict[str, Any]] = []
        by_class: dict[str, list[dict[str, Any]]] = {}
        for region in self._coco.imgToAnns.get(image["id"], []):
            owner = self.categories[region["category_id"]]
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
