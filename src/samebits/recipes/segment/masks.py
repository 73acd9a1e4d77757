"""Images and masks in a folder: `images/a.jpg` with `masks/a.png`, whose pixel values are classes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from samebits.cores import num_cores
from samebits.data.images import ByteArray, EncodedImage, looked_at, read_head, stored_size
from samebits.data.names import check_names, walk
from samebits.errors import DataError
from samebits.metrics.segmentation import IGNORED
from samebits.recipes.listing import some
from samebits.recipes.segment.config import MAX_CLASSES, MAX_PIXELS, DataConfig
from samebits.recipes.segment.data import LabelSource

ValueArray = npt.NDArray[np.uint16]
_LOSSY = (".jpg", ".jpeg", ".jfif", ".webp")
NUM_VALUES = 1 << 16
BLOCK = 1 << 20  # pixels that numpy indexes with at a time: it copies indices to 64 bits
_TURNED_BY_90 = 5  # EXIF orientations from here on swap width and height
_TURN_FIX = (
    "Apply the EXIF orientation to the image (mogrify -auto-orient) if the mask is upright,\n"
    "else remove it (exiftool -Orientation=)."
)


class MaskFolder:
    """A folder with a folder of images and one of masks.

    Args:
        config: Names of the two folders, the suffix of masks, and the value that is ignored.

    Attributes:
        names: Names of the images that have a mask, relative to their folder and without extension, sorted.
        num_without_mask: Number of the other images.
        left_out: Number of files that are not used, by their ending or folder.

    Raises:
        DataError: There are no such folders, no masks, or a mask without an image.
    """

    def __init__(self, root: Path, setting: str, config: DataConfig) -> None:
        self._root = root.expanduser()
        self._ignore_label = config.ignore_label
        self.left_out = Counter[str]()
        self._images = self._list(config.image_folder, setting, "")
        self._masks = self._list(config.mask_folder, setting, config.mask_suffix)
        if not self._masks:
            raise DataError(
                f"{self._root / config.mask_folder} contains no masks",
                given=f"data.mask_suffix={config.mask_suffix}" if config.mask_suffix else None,
                allowed=f"a mask for each image, such as a{config.mask_suffix}.png for a.jpg",
                fix="Add masks, or set data.mask_folder and data.mask_suffix.",
            )
        for name, mask in self._masks.items():
            if name not in self._images:
                raise DataError(
                    f"the mask {self._root / mask} has no image",
                    allowed=f"{self._root / config.image_folder / name}.jpg, .png or another image file",
                    fix="Add the image, remove the mask, or set data.image_folder and data.mask_suffix.",
                )
        self.names = sorted(self._masks)
        self.num_without_mask = len(self._images) - len(self._masks)

    def image_path(self, name: str) -> Path:
        """Return the path of an image."""
        return self._root / self._find(self._images, name)

    def pair(self, name: str) -> tuple[EncodedImage, ValueArray, bytes]:
        """Open an image, and read the (H, W) values of its mask and its palette; see `open_pair`."""
        return open_pair(self.image_path(name), self._root / self._find(self._masks, name))

    def opened(self, names: Sequence[str], info: Mapping[str, Any]) -> LabelSource:
        """Return images with the labels from their masks.

        To read an image raises DataError if a file cannot be read, or if the mask does not fit the image or has a value
        that is no class.

        Args:
            info: `values`: the value of each class in the masks.

        Raises:
            DataError: An image or its mask is missing, or of up to a thousand that are looked at, one has another size.
        """
        for name in looked_at(names):
            image = stored_size(read_head(self.image_path(name)))
            mask = stored_size(read_head(self._root / self._find(self._masks, name)))
            # As sets: an EXIF orientation, which may be behind the pixels, swaps width and height.
            if image and mask and {*image} != {*mask}:
                self.pair(name)  # its error names the cause
        files = [
            self._root / self._find(found, name)
            for found in (self._images, self._masks)
            for name in names
        ]
        values: Sequence[int] = info["values"]
        # No bytes: classes and IGNORED can take all their values, and -1 is for those that are no class.
        table = np.full(NUM_VALUES, -1, np.int16)
        if self._ignore_label is not None:
            table[self._ignore_label] = IGNORED
        table[list(values)] = np.arange(len(values))
        return LabelSource(names, partial(self._read, values=values, table=table), files)

    def _read(
        self, name: str, _key: int, *, values: Sequence[int], table: npt.NDArray[np.int16]
    ) -> tuple[ByteArray, ByteArray]:
        encoded, found, _ = self.pair(name)
        pixels = encoded.pixels()
        labels = np.empty(found.shape, np.int16)
        for start in range(0, found.size, BLOCK):
            block = slice(start, start + BLOCK)
            np.take(table, found.reshape(-1)[block], out=labels.reshape(-1)[block])
        if labels.min(initial=0) < 0:
            row, column = (int(place[0]) for place in np.nonzero(labels < 0))
            shown = some(list(map(str, values)), _SHOWN)
            ignored = (
                "" if self._ignore_label is None else f"; {self._ignore_label} for ignored pixels"
            )
            raise DataError(
                f"the mask {self._root / self._masks[name]} has the value {found[row, column]}, which is no class",
                where=f"x={column}, y={row}",
                allowed=shown + ignored,
                fix="Correct the mask, or add the value to data.values.",
            )
        return pixels, labels.astype(np.uint8)

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
        files = sorted(walk(self._root, folder, self.left_out))
        check_names(self._root, files)
        for file in files:
            name = file.removeprefix(f"{folder}/").rpartition(".")[0]
            if not name.endswith(suffix):
                continue
            name = name.removesuffix(suffix)
            if name in found:
                raise DataError(
                    f"{self._root} has two files for {name}",
                    given=f"{found[name]}, {file}",
                    fix="Remove one of them.",
                )
            found[name] = file
        return found


def open_pair(image: Path, mask: Path) -> tuple[EncodedImage, ValueArray, bytes]:
    """Open an image, and read the pixel values of its mask: of one channel, or the indices of a palette.

    Returns:
        The image and (H, W) values, both upright by their EXIF orientation; and red, green and blue of each value of
        the mask's palette, empty without one.

    Raises:
        DataError: A file cannot be read, or the mask does not fit the image: it has colors, values outside of 0 to
            65,535, a lossy format or another size, or the image is turned by EXIF and the mask may be or not.
    """
    encoded = EncodedImage(image, max_pixels=MAX_PIXELS)
    values, mask_orientation, palette = _read_values(mask)
    (width, height), (mask_height, mask_width), turn = (
        encoded.size,
        values.shape,
        encoded.orientation,
    )
    if (mask_width, mask_height) != (width, height):
        is_swapped = (mask_width, mask_height) == (height, width)
        raise DataError(
            f"the mask {mask} is {mask_width}x{mask_height}, but its image is {width}x{height}",
            where=image,
            cause=None
            if not is_swapped
            else f"the image is turned by its EXIF orientation ({turn}), and the mask is not"
            if turn >= _TURNED_BY_90
            else "the mask has width and height swapped",
            fix=_TURN_FIX
            if is_swapped and turn >= _TURNED_BY_90
            else "Use a mask of the size of the image.",
        )
    if turn not in (1, mask_orientation) and (turn < _TURNED_BY_90 or width == height):
        raise DataError(
            f"the mask {mask} may be upright, or turned as its image is stored",
            given=f"EXIF orientation {turn} of the image, {mask_orientation} of the mask, and one size with both",
            where=image,
            fix=_TURN_FIX,
        )
    return encoded, values, palette


def _read_values(path: Path) -> tuple[ValueArray, int, bytes]:
    """Return the (H, W) values of a mask, upright by the EXIF orientation of its file; and orientation and palette."""
    expected = "a PNG file of one channel or with a palette, whose values are classes"
    if path.suffix.lower() in _LOSSY:
        raise DataError(
            f"the mask {path} has a lossy format, which changes values",
            allowed=expected,
            fix="Save masks as PNG.",
        )
    encoded = EncodedImage(path, max_pixels=MAX_PIXELS)
    image = encoded.image()
    if len(image.getbands()) > 1 or image.mode.startswith("F"):
        kind = "floating-point numbers" if image.mode.startswith("F") else "colors"
        raise DataError(
            f"the mask {path} has {kind}, not classes",
            given=f"mode {image.mode}",
            allowed=expected,
            fix="Convert each color to the number of its class, and save one channel."
            if kind == "colors"
            else "Save whole numbers.",
        )
    values = np.asarray(image)
    low = int(values.min(initial=0))
    high = int(values.max(initial=0))
    if low < 0 or high >= NUM_VALUES:
        raise DataError(
            f"the mask {path} has the value {low if low < 0 else high}",
            allowed="0 to 65,535",
            cause="negative values often stand for pixels without a class" if low < 0 else None,
            fix="Save pixels without a class as 255, or as another value and set data.ignore_label."
            if low < 0
            else "Correct the mask.",
        )
    return (
        values.astype(np.uint16, copy=False),
        encoded.orientation,
        bytes(image.getpalette("RGB") or ()),
    )


# Values that occur in masks, and those of them that are classes.


MAX_THREADS = 4  # each one may hold a mask of MAX_PIXELS
_SHOWN = 12
_MIN_THIN = 4  # values, and more than half: lossy masks have about ten for each class


@dataclass(frozen=True)
class MaskValues:
    """Values in the masks of a folder."""

    by_name: dict[str, list[int]]  #: The values of each mask, by the name of its image.
    thick: set[int]  #: Values that somewhere have equal neighbors on all four sides.
    #: Value -> color of a palette -> name of an image whose mask shows the value in this color.
    colors: dict[int, dict[bytes, str]]


def find_values(folder: MaskFolder) -> MaskValues:
    """Read all masks of a folder, and compare them with their images.

    Raises:
        DataError: A mask cannot be read, or does not fit its image.
    """

    def values_of(name: str) -> tuple[list[int], list[int], bytes]:
        _, values, palette = folder.pair(name)
        has_equal = np.ones(values.shape, bool)
        for part, whole in ((has_equal, values), (has_equal.T, values.T)):
            is_same = whole[1:] == whole[:-1]
            part[1:] &= is_same
            part[:-1] &= is_same
        return np.unique(values).tolist(), np.unique(values[has_equal]).tolist(), palette

    # Threads instead of processes, since decoding releases the GIL.
    with ThreadPoolExecutor(min(num_cores(), MAX_THREADS)) as pool:
        found = dict(zip(folder.names, pool.map(values_of, folder.names), strict=True))
    thick = {value for _, values, _ in found.values() for value in values}
    colors: dict[int, dict[bytes, str]] = {}
    for name, (values, _, palette) in found.items():
        for value in values if palette else ():
            colors.setdefault(value, {}).setdefault(palette[3 * value : 3 * value + 3], name)
    return MaskValues({name: values for name, (values, _, _) in found.items()}, thick, colors)


def _check_colors(found: Sequence[MaskValues], root: Path) -> None:
    """Check that a value has one color: programs that write palette files with few colors number them again in each."""
    for value in sorted({value for each in found for value in each.colors}):
        colors = {
            color: name for each in found for color, name in each.colors.get(value, {}).items()
        }
        if len(colors) > 1:
            raise DataError(
                f"the masks of {root} have palettes of their own: value {value} has several colors",
                given="\n".join(
                    f"{name}: #{color.hex()}" for color, name in list(colors.items())[:3]
                ),
                cause="A program has numbered the colors of each file again (optipng, oxipng, quantize).",
                fix="Write the masks again with one palette, or as one channel with the number of the class.\n"
                "If the values are the classes whatever their colors are, set data.values to them.",
            )


def choose_values(found: Sequence[MaskValues], config: DataConfig, root: Path) -> list[int]:
    """Choose the values that are classes from those that occur in the masks.

    Raises:
        DataError: There are too few or too many, they do not match the names, the masks were saved with loss, or have
            palettes of their own.
    """
    _check_colors(found, root)
    occurring = sorted(
        {value for each in found for values in each.by_name.values() for value in values}
    )
    values = [value for value in occurring if value != config.ignore_label]
    if len(values) < 2:
        values = occurring  # masks of 0 and 255: then 255 is the second class
    given = f"{len(occurring):,} values in the masks: {some(list(map(str, occurring)), _SHOWN)}"
    thin = [value for value in values if not any(value in each.thick for each in found)]
    if len(thin) >= max(_MIN_THIN, len(values) // 2 + 1):
        raise DataError(
            f"the masks of {root} have values that no region has",
            given=f"{given}\n{len(thin):,} of them only in lines or single pixels",
            cause="masks were resized with interpolation, or saved with loss (JPEG) before they got this format",
            fix="Make the masks again: resize by the nearest pixel, and save as PNG only.\n"
            "If all of these values are classes, set data.values to them.",
        )
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
