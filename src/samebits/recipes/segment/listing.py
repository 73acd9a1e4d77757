"""List the images of a dataset, their classes and the validation split; and open them.

A listing is plain JSON and is stored in the run folder.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel

from samebits.data.coco import (
    Folder,
    Id,
    RegionEntry,
    check_entries,
    draw_regions,
    index_coco,
    open_folder,
    read_coco,
)
from samebits.data.images import ByteArray
from samebits.data.names import choose_validation, overlap_rows
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.listing import is_another_set, nearest_fix, some, whole_path
from samebits.recipes.segment.config import MAX_CLASSES, MAX_PIXELS, DataConfig
from samebits.recipes.segment.data import LabelSource
from samebits.recipes.segment.make import CLASSES, synthetic_shapes
from samebits.recipes.segment.masks import MaskFolder, choose_values, find_values

# Images and their regions in a COCO annotation file, as labels of pixels.


BACKGROUND = "background"


def _class_name(name: str) -> str:
    if not (0 < len(name) <= 200 and name.isprintable()):
        raise ValueError("a name of one line")
    return name


class _Category(BaseModel):
    id: Id
    name: Annotated[str, AfterValidator(_class_name)]


def _bounds(outlines: Sequence[Sequence[float]]) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a region's polygons, in pixels."""
    pairs = [np.reshape(outline[: len(outline) // 2 * 2], (-1, 2)) for outline in outlines]
    points = np.concatenate(pairs)
    return *points.min(axis=0).tolist(), *points.max(axis=0).tolist()


def _covers_a_pixel(region: Any, image: Mapping[str, int]) -> bool:
    """Return whether polygons cover a pixel of an image. Run lengths always count as if they did."""
    if isinstance(region, dict):
        return True
    left, top, right, bottom = _bounds(region)
    return (
        min(right, image["width"]) - max(left, 0) >= 1
        and min(bottom, image["height"]) - max(top, 0) >= 1
    )


class CocoFile:
    """A COCO annotation file, checked field by field.

    Attributes:
        categories: Names of the categories, by their number.
        names: File names of the images, sorted.
        num_without_mask: 0, and `left_out` is empty: both are for folders of masks.

    Raises:
        DataError: It can't be read, or a field is invalid.
    """

    def __init__(self, path: Path, config: DataConfig) -> None:
        self.path = path.expanduser()
        self.num_without_mask = 0
        self.left_out = Counter[str]()
        self._folder = self.path.parent if config.images is None else config.images.expanduser()
        content = read_coco(self.path)
        categories = check_entries(content["categories"], _Category, "categories", self.path)
        self.categories: dict[int, str] = dict(
            sorted((entry["id"], entry["name"]) for entry in categories)
        )
        ids = {image["id"] for image in content["images"]}
        known = {"image_id": ids, "category_id": self.categories}
        # Some tools number all regions 0.
        regions = check_entries(
            content["annotations"],
            RegionEntry,
            "annotations",
            self.path,
            known=known,
            unique=False,
        )
        self._coco = index_coco(
            {"images": content["images"], "annotations": regions, "categories": categories}
        )
        self._images: dict[str, dict[str, Any]] = {
            image["file_name"]: image for image in content["images"]
        }
        self._check_places(regions)
        self.names = sorted(image["file_name"] for image in content["images"])
        for name, other in pairwise(self.names):
            if name == other:
                raise DataError(
                    f"{name} is listed twice in {self.path}", fix="Remove one of the entries."
                )

    def _check_places(self, regions: Sequence[Mapping[str, Any]]) -> None:
        """Check that some region of each category covers a pixel: a class without pixels would be learned at once."""
        first: dict[int, Mapping[str, Any]] = {}
        covering = set()
        for region in regions:
            kind = region["category_id"]
            first.setdefault(kind, region)
            if kind not in covering and _covers_a_pixel(
                region["segmentation"], self._coco.imgs[region["image_id"]]
            ):
                covering.add(kind)
        for kind, region in first.items():
            if kind not in covering:
                box = ", ".join(f"{value:g}" for value in _bounds(region["segmentation"]))
                raise DataError(
                    f"no region of {self.categories[kind]} in {self.path} covers a pixel of its image",
                    given=f"annotation {region['id']}: left, top, right, bottom {box}",
                    cause="coordinates are fractions of the image (0 to 1), or the image is another one",
                    fix="Write coordinates in pixels of the images.",
                )

    def image_path(self, name: str) -> Path:
        """Return the path of an image."""
        return self._folder / name

    def classes_by_name(self, classes: Sequence[str]) -> dict[str, set[str]]:
        """Return which of the classes each image has, by its file name. All have the first, the background."""
        found = {}
        for name in self.names:
            regions = self._coco.imgToAnns.get(self._images[name]["id"], [])
            owners = {
                self.categories[each["category_id"]] for each in regions if not each["iscrowd"]
            }
            found[name] = {classes[0], *owners.intersection(classes)}
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
        fix = "Set data.images to the folder of the images."
        folder = open_folder([self._folder], names, fix)
        folder.check_sizes({name: self._size(name) for name in names})
        read = partial(self._read, folder=folder, classes=info["classes"])
        return LabelSource(
            names, read, [str(self.path), *(f"{folder.path}/{name}" for name in names)]
        )

    def _size(self, name: str) -> tuple[int, int]:
        """Return the (width, height) of an image by its annotation."""
        if name not in self._images:
            raise DataError(
                f"{self.path} has no image {name}",
                cause="it has changed since the start of the run",
                fix="Restore the file, or start a new run.",
            )
        width = self._images[name]["width"]
        height = self._images[name]["height"]
        if width * height > MAX_PIXELS:
            raise DataError(
                f"the image {name} is {width}x{height}",
                allowed=f"up to {MAX_PIXELS:,} pixels",
                fix="Resize the image and its regions, or remove it from the annotation file.",
            )
        return width, height

    def _read(
        self, name: str, _key: int, *, folder: Folder, classes: Sequence[str]
    ) -> tuple[ByteArray, ByteArray]:
        size = self._size(name)
        return folder.pixels(name, size), self._labels(self._images[name], classes)

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
            labels = np.where(
                inside, np.where(labels, np.uint8(IGNORED), np.uint8(classes.index(owner))), labels
            )
        # Last, so that a crowd is ignored where regions of classes cover it.
        labels[draw_regions(self._coco, crowds, image["id"]) > 0] = IGNORED
        return labels


Dataset = CocoFile | MaskFolder


def list_images(config: DataConfig, seed: int) -> dict[str, Any]:
    """List the images of the settings and split them by the seed, if the settings do not name validation images.

    Raises:
        DataError: There are no images, their masks or annotations are invalid, or the splits do not match.
    """
    if config.name == "shapes":
        return {"classes": list(CLASSES), "num_without_mask": 0}
    path = config.path(train=True)
    assert path is not None  # as `Config.check_inputs` has checked
    train = _open_dataset(path, config, train=True)
    validation = train if config.eval is None else _open_dataset(config.eval, config, train=False)
    datasets = [train] if validation is train else [train, validation]
    chosen = set(validation.names)
    if config.eval is None:
        if len(train.names) < 2:
            raise DataError(
                f"{path} has only one image, so it cannot be split",
                fix="Add images, or set data.eval.",
            )
        chosen = choose_validation(train.names, config.val_fraction, seed)
    names = [name for name in train.names if config.eval is not None or name not in chosen]
    classes, labels = _classes_of(config, path, datasets)
    for kind, part, found in (("training", names, labels[0]), ("validation", chosen, labels[-1])):
        occurring = {label for name in part for label in found.get(name, ())}
        if found and len(occurring) < 2:
            raise DataError(
                f"the {kind} images have only the class {next(iter(occurring), BACKGROUND)}",
                where=path if kind == "training" else config.eval or path,
                cause="a model that always predicts this class would have mIoU 1",
                fix="Use masks or annotations of two or more classes, or another split: data.val_fraction, data.eval.",
            )
    return {
        **classes,
        "num_without_mask": train.num_without_mask,
        "left_out": sum((part.left_out for part in datasets), Counter()),
        "warnings": overlap_rows(
            *(
                [os.path.abspath(dataset.image_path(name)) for name in part]
                for dataset, part in ((train, names), (validation, chosen))
            )
        ),
        "held_out_from": None if config.eval is None else whole_path(config.eval),
        "train": names,
        "held_out": sorted(chosen),
    }


def open_source(config: DataConfig, dataset_info: Mapping[str, Any], *, train: bool) -> LabelSource:
    """Open the training or validation images of a listing. Raises DataError if a file is missing or has changed."""
    if config.name == "shapes":
        return synthetic_shapes(config.num_train if train else config.num_eval, train=train)
    path = config.path(train=train)
    assert path is not None
    dataset = _open_dataset(path, config, train=train)
    names: Sequence[str] = dataset_info["train" if train else "held_out"]
    if not train and is_another_set(config, dataset_info):
        names = dataset.names
    return dataset.opened(names, dataset_info)


def _open_dataset(path: Path, config: DataConfig, *, train: bool) -> Dataset:
    if path.expanduser().is_file():
        return CocoFile(path, config)
    return MaskFolder(path, config.setting(train=train), config)


def _classes_of(
    config: DataConfig, path: Path, datasets: Sequence[Dataset]
) -> tuple[dict[str, Any], list[Mapping[str, Collection[object]]]]:
    """Return the names of the classes, for masks the value of each, and for each dataset the labels of its images.

    Labels are empty if the masks are not read.
    """
    folders = [dataset for dataset in datasets if isinstance(dataset, MaskFolder)]
    files = [dataset for dataset in datasets if isinstance(dataset, CocoFile)]
    if folders and files:
        raise DataError(
            "data.train and data.eval are a folder and a COCO file",
            fix="Use the same form for both.",
        )
    if files:
        classes = _coco_classes(config, files)
        return {"classes": classes}, [file.classes_by_name(classes) for file in files]
    labels: list[Mapping[str, Collection[object]]] = [{}]
    if config.values is not None:
        values = list(config.values)
    else:
        found = [find_values(folder) for folder in folders]
        values = choose_values(found, config, path)
        labels = [
            {name: set(values).intersection(each) for name, each in part.by_name.items()}
            for part in found
        ]
    return {"classes": list(config.classes or map(str, values)), "values": values}, labels


def _coco_classes(config: DataConfig, files: Sequence[CocoFile]) -> list[str]:
    train, *others = files
    known = [name for name in train.categories.values() if name != BACKGROUND]
    if len(set(known)) < len(known):
        raise DataError(
            f"{train.path} has two categories of one name", fix="Rename one of the categories."
        )
    chosen = (
        known if config.classes is None else [name for name in config.classes if name != BACKGROUND]
    )
    for name in chosen:
        if name not in known:
            raise DataError(
                f"{train.path} has no category {name}",
                given="data.classes",
                allowed=some(known, 12),
                fix=nearest_fix(name, known, "Correct data.classes."),
            )
    for file in others if config.classes is None else ():
        for name in file.categories.values():
            if name not in [*known, BACKGROUND]:
                raise DataError(
                    f"category {name} is in {file.path}, but not in {train.path}",
                    fix="Rename the category, or set data.classes.",
                )
    if not 1 <= len(chosen) < MAX_CLASSES:
        raise DataError(
            f"{train.path} has {len(chosen):,} categories",
            allowed=f"1 to {MAX_CLASSES - 1}",
            fix="Set data.classes to the categories to use.",
        )
    return [BACKGROUND, *chosen]
