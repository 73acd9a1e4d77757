"""Images and masks in a folder: `images/a.jpg` with `masks/a.png`, whose pixel values are classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.cores import num_cores
from samebits.data.images import ByteArray, EncodedImage
from samebits.data.names import check_names, walk
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.segment.config import MAX_CLASSES, DataConfig

MAX_PIXELS = 1 << 26  # logits are interpolated to this size: some 9 bytes for each pixel
_LOSSY = (".jpg", ".jpeg", ".jfif", ".webp")
_VALUES = 1 << 16
_SHOWN = 12
_BLOCK = 1 << 20  # pixels that numpy indexes with at a time: it copies indices to 64 bits
_MAX_THREADS = 4  # each one may hold a mask of MAX_PIXELS


class MaskFolder:
    """A folder with a folder of images and one of masks.

    Args:
        root: The folder.
        setting: The setting that names it, for errors.
        config: Names of the two folders, and the suffix of masks.

    Attributes:
        names: Names of the images that have a mask, relative to their folder and without extension, sorted.
        num_without_mask: Number of the other images.

    Raises:
        DataError: There are no such folders, no masks, or a mask without an image.
    """

    def __init__(self, root: Path, setting: str, config: DataConfig) -> None:
        self._root = root.expanduser()
        self._images = self._list(config.image_folder, setting, "")
        self._masks = self._list(config.mask_folder, setting, config.mask_suffix)
        if not self._masks:
            raise DataError(
                f"{self._root / config.mask_folder} contains no masks",
                given=f"data.mask_suffix={config.mask_suffix}" if config.mask_suffix else None,
                allowed=f"a mask for each image, such as a{config.mask_suffix}.png for a.jpg",
                fix="Add masks, or set data.mask_folder and data.mask_suffix.",
            )
        alone = next((name for name in self._masks if name not in self._images), None)
        if alone is not None:
            raise DataError(
                f"the mask {self._root / self._masks[alone]} has no image",
                allowed=f"{self._root / config.image_folder / alone}.jpg, .png or another image file",
                fix="Add the image, remove the mask, or set data.image_folder and data.mask_suffix.",
            )
        self.names = sorted(self._masks)
        self.num_without_mask = len(self._images) - len(self._masks)

    def image_path(self, name: str) -> Path:
        """Return the path of an image."""
        return self._root / self._find(self._images, name)

    def mask_path(self, name: str) -> Path:
        """Return the path of a mask."""
        return self._root / self._find(self._masks, name)

    def _find(self, files: Mapping[str, str], name: str) -> str:
        if name not in files:
            raise DataError(
                f"the image {name} of {self._root} or its mask is missing",
                cause="it was deleted after the start of the run, or the dataset was moved",
                fix="Restore it, or set data.root to the folder of the dataset.",
            )
        return files[name]

    def _list(self, folder: str, setting: str, suffix: str) -> dict[str, str]:
        """Return the image files of a folder, by name without suffix and extension."""
        if not (self._root / folder).is_dir():
            raise DataError(
                f"{self._root} has no folder {folder}",
                given=f"{setting}={self._root}",
                allowed=f"{self._root}/images/a.jpg, {self._root}/masks/a.png and so on, or a COCO annotation file",
                fix=f"Set {setting} to such a folder, or data.image_folder and data.mask_folder to their names.",
            )
        found: dict[str, str] = {}
        files = sorted(walk(self._root, folder))
        check_names(self._root, files)
        for file in files:
            name = file.removeprefix(f"{folder}/").rpartition(".")[0]
            if not name.endswith(suffix):
                continue
            name = name.removesuffix(suffix)
            if name in found:
                raise DataError(
                    f"{self._root} has two files for {name}", given=f"{found[name]}, {file}", fix="Remove one of them."
                )
            found[name] = file
        return found


def read_mask(path: Path) -> npt.NDArray[np.uint16]:
    """Read the pixel values of a mask: of one channel, or the indices of a palette.

    Returns:
        (H, W) values.

    Raises:
        DataError: It cannot be read, has colors, values above 65,535 or too many pixels, or its format is lossy.
    """
    expected = "a PNG file of one channel or with a palette, whose values are classes"
    if path.suffix.lower() in _LOSSY:
        raise DataError(
            f"the mask {path} has a lossy format, which changes values", allowed=expected, fix="Save masks as PNG."
        )
    image = EncodedImage(path, max_pixels=MAX_PIXELS).image()
    if len(image.getbands()) > 1 or image.mode.startswith("F"):
        raise DataError(
            f"the mask {path} has colors, not classes",
            given=f"mode {image.mode}",
            allowed=expected,
            fix="Convert each color to the number of its class, and save one channel.",
        )
    values = np.asarray(image)
    if values.min(initial=0) < 0 or values.max(initial=0) >= _VALUES:
        raise DataError(f"the mask {path} has value {values.max()}", allowed="0 to 65,535", fix="Correct the mask.")
    return values.astype(np.uint16, copy=False)


def find_values(paths: Sequence[Path]) -> list[int]:
    """Return the values that occur in masks, in ascending order."""

    def values_of(path: Path) -> npt.NDArray[np.intp]:
        values, occurs = read_mask(path).reshape(-1), np.zeros(_VALUES, bool)
        for start in range(0, values.size, _BLOCK):
            occurs[values[start : start + _BLOCK]] = True
        return np.flatnonzero(occurs)

    # Threads instead of processes, since decoding releases the GIL.
    with ThreadPoolExecutor(min(num_cores(), _MAX_THREADS)) as pool:
        return sorted({value for found in pool.map(values_of, paths) for value in found.tolist()})


def choose_values(found: Sequence[int], config: DataConfig, root: Path) -> list[int]:
    """Choose the values that are classes from those that occur in the masks.

    Args:
        found: The values, in ascending order.
        config: Names of the classes, and the value that is ignored.
        root: The dataset, for errors.

    Raises:
        DataError: There are too few or too many, or they do not match the names.
    """
    values = [value for value in found if value != config.ignore_label]
    if len(values) < 2:
        values = list(found)  # masks of 0 and 255: then 255 is the second class
    shown = ", ".join(map(str, found[:_SHOWN])) + (" …" if len(found) > _SHOWN else "")
    given = f"{len(found):,} values in the masks: {shown}"
    if not 2 <= len(values) <= MAX_CLASSES:
        raise DataError(
            f"the masks of {root} have {'only one class' if len(values) < 2 else f'{len(values):,} classes'}",
            given=given,
            allowed=f"2 to {MAX_CLASSES}",
            fix="Use masks with the number of a class in each pixel, or set data.values to the values of the classes.",
        )
    if config.classes is None or len(values) == len(config.classes):
        return values
    if values[-1] < len(config.classes):
        return list(range(len(config.classes)))  # some classes occur in no mask
    raise DataError(
        f"the masks of {root} have other values than data.classes, which names {len(config.classes)} classes",
        given=given,
        allowed=f"0 to {len(config.classes) - 1}, and {config.ignore_label} for ignored pixels",
        fix="Correct data.classes, or set data.values to the value of each class.",
    )


class LabeledFolder:
    """Images of a folder with the labels from their masks.

    Args:
        folder: The folder.
        names: Names of the images to use.
        values: Value of each class in the masks.
        ignore_label: Value of pixels that are not counted, unless it is a class. None: there is none.
    """

    def __init__(
        self, folder: MaskFolder, names: Sequence[str], values: Sequence[int], ignore_label: int | None
    ) -> None:
        self._names, self._values, self._ignore_label = names, values, ignore_label
        self._images, self._masks = ([find(name) for name in names] for find in (folder.image_path, folder.mask_path))
        # No bytes: classes and IGNORED can take all their values, and -1 is for those that are no class.
        self._table = np.full(_VALUES, -1, np.int16)
        if ignore_label is not None:
            self._table[ignore_label] = IGNORED
        self._table[list(values)] = np.arange(len(values))

    def __len__(self) -> int:
        return len(self._names)

    @property
    def files(self) -> list[Path]:
        """Paths of the images and masks."""
        return [*self._images, *self._masks]

    def name(self, index: int) -> str:
        """Return the name of an image."""
        return self._names[index]

    def read(self, index: int, key: int) -> tuple[ByteArray, ByteArray]:
        """Read an image, (H, W, 3) bytes, and its labels, (H, W) bytes.

        Raises:
            DataError: A file cannot be read, the sizes differ, or the mask has a value that is no class.
        """
        pixels = EncodedImage(self._images[index], max_pixels=MAX_PIXELS).pixels()
        path = self._masks[index]
        values = read_mask(path)
        if values.shape != pixels.shape[:2]:
            (height, width), (mask_height, mask_width) = pixels.shape[:2], values.shape
            raise DataError(
                f"the mask {path} is {mask_width}x{mask_height}, but its image is {width}x{height}",
                where=self._images[index],
                cause="the image has an EXIF rotation, and the mask was drawn without it"
                if values.shape == (width, height) and width != height
                else None,
                fix="Use a mask of the size of the image.",
            )
        labels = np.empty(values.shape, np.int16)
        for start in range(0, values.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            np.take(self._table, values.reshape(-1)[block], out=labels.reshape(-1)[block])
        if labels.min(initial=0) < 0:
            row, column = (int(place[0]) for place in np.nonzero(labels < 0))
            shown = ", ".join(map(str, self._values[:_SHOWN])) + (" …" if len(self._values) > _SHOWN else "")
            ignored = "" if self._ignore_label is None else f"; {self._ignore_label} for ignored pixels"
            raise DataError(
                f"the mask {path} has the value {values[row, column]}, which is no class",
                where=f"x={column}, y={row}",
                allowed=shown + ignored,
                fix="Correct the mask, or add the value to data.values.",
            )
        return pixels, labels.astype(np.uint8)
