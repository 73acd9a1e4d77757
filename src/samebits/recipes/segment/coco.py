"""Images and their regions in a COCO annotation file, as labels of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from samebits.data.coco.fields import (
    Fields,
    check_pixels,
    entries_of,
    is_id,
    is_name,
    is_side,
    read_json,
)
from samebits.data.coco.regions import MAX_OUTLINES_PX, Annotated, draw_regions, read_region
from samebits.data.coco.store import decode, open_store
from samebits.data.image_file import MAX_PIXELS
from samebits.data.images import ByteArray
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment import masks

BACKGROUND = "background"
_NO_BOX = np.zeros(4)


class CocoFile:
    """A COCO annotation file, checked field by field.

    Args:
        path: The file.

    Attributes:
        names: File names of the images, sorted.
        categories: Names of the categories, by their number.

    Raises:
        DataError: It can't be read, or a field is invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        content = read_json(self.path)
        parts = {name: entries_of(content, name, self.path) for name in ("images", "annotations", "categories")}
        images, regions, categories = (Fields(entries, name, self.path) for name, entries in parts.items())
        numbers = categories.column("id", is_id, "a whole number of 64 bits")
        categories.unique("id", numbers)
        texts = categories.column("name", is_class_name, "a name of one line")
        self.categories = dict(sorted(zip(numbers, texts, strict=True)))

        ids = images.column("id", is_id, "a whole number of 64 bits")
        images.unique("id", ids)
        names = images.column("file_name", is_name, "a file name that can be printed, without .. or a leading /")
        sizes = f"a whole number of pixels, up to {MAX_PIXELS:,} in the image"
        widths, heights = (images.column(name, is_side, sizes) for name in ("width", "height"))
        check_pixels(widths, heights, ids, self.path)
        self._images: dict[str, tuple[int, int, int]] = dict(
            zip(names, zip(ids, widths, heights, strict=True), strict=True)
        )
        if len(self._images) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{twice} is listed twice in {self.path}", fix="Remove one of the entries.")
        self.names = sorted(names)

        known = dict.fromkeys(ids)
        owners = regions.column("image_id", known.__contains__, "the id of one of the file's images")
        owned = regions.column("category_id", self.categories.__contains__, "the id of one of the file's categories")
        crowds = regions.column("iscrowd", lambda value: value in (0, 1, None), "0 or 1")
        self._regions: dict[int, list[tuple[str | None, Annotated]]] = {}
        annotation_ids = regions.column("id", is_id, "a whole number of 64 bits")
        for place, (owner, category, is_crowd) in enumerate(zip(owners, owned, crowds, strict=True)):
            region = read_region(regions, place)
            if region is None:
                raise regions.wrong(place, "segmentation", "polygons, or run lengths with size and counts")
            name = None if is_crowd else self.categories[category]
            found = Annotated(annotation_ids[place], region, _NO_BOX)
            self._regions.setdefault(owner, []).append((name, found))

    def size(self, name: str) -> tuple[int, int]:
        """Return the (width, height) of an image by its annotation, pixels."""
        _, width, height = self._entry(name)
        return width, height

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
        number, width, height = self._entry(name)
        labels = np.zeros((height, width), np.uint8)
        by_class: dict[str | None, list[Annotated]] = {}
        for owner, region in self._regions.get(number, []):
            if owner is None or owner in classes[1:]:
                by_class.setdefault(owner, []).append(region)
        crowds, left_px = by_class.pop(None, []), float(MAX_OUTLINES_PX)
        for owner, regions in by_class.items():
            inside, left_px = draw_regions(regions, (width, height), number, left_px=left_px)
            labels = np.where(inside, np.where(labels, np.uint8(IGNORED), np.uint8(classes.index(owner))), labels)
        if crowds:
            inside, _ = draw_regions(crowds, (width, height), number, left_px=left_px)
            labels[inside > 0] = IGNORED
        return labels

    def _entry(self, name: str) -> tuple[int, int, int]:
        if name not in self._images:
            raise DataError(
                f"{self.path} has no image {name}",
                cause="it has changed since the start of the run",
                fix="Restore the file, or start a new run.",
            )
        return self._images[name]


def is_class_name(value: object) -> bool:
    """Return whether a value can be the name of a class in tables and pictures."""
    return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()


class LabelledFile:
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
