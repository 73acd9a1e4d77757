"""Values that occur in masks, and those of them that are classes."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from samebits.cores import num_cores
from samebits.errors import DataError
from samebits.recipes.listing import some
from samebits.recipes.segment.config import MAX_CLASSES, DataConfig
from samebits.recipes.segment.masks import BLOCK, NUM_VALUES, MaskFolder

MAX_THREADS = 4  # each one may hold a mask of MAX_PIXELS
_SHOWN = 12
_MIN_THIN = 4  # values, and more than half: lossy masks have about ten for each class


@dataclass(frozen=True)
class FoundValues:
    """Values in the masks of a folder."""

    by_name: dict[str, list[int]]  #: The values of each mask, by the name of its image.
    thick: set[int]  #: Values that somewhere have equal neighbors on all four sides.


def find_values(folder: MaskFolder) -> FoundValues:
    """Read all masks of a folder, and compare them with their images.

    Raises:
        DataError: A mask cannot be read, or does not fit its image.
    """

    def values_of(name: str) -> tuple[list[int], list[int]]:
        values = folder.pair(name)[1]
        has_equal = np.ones(values.shape, bool)
        for part, whole in ((has_equal, values), (has_equal.T, values.T)):
            is_same = whole[1:] == whole[:-1]
            part[1:] &= is_same
            part[:-1] &= is_same
        return _occurring(values.reshape(-1)), _occurring(values[has_equal])

    # Threads instead of processes, since decoding releases the GIL.
    with ThreadPoolExecutor(min(num_cores(), MAX_THREADS)) as pool:
        found = dict(zip(folder.names, pool.map(values_of, folder.names), strict=True))
    thick = {value for _, values in found.values() for value in values}
    return FoundValues({name: values for name, (values, _) in found.items()}, thick)


def _occurring(values: npt.NDArray[np.uint16]) -> list[int]:
    occurs = np.zeros(NUM_VALUES, bool)
    for start in range(0, values.size, BLOCK):
        occurs[values[start : start + BLOCK]] = True
    return np.flatnonzero(occurs).tolist()


def choose_values(found: Sequence[FoundValues], config: DataConfig, root: Path) -> list[int]:
    """Choose the values that are classes from those that occur in the masks.

    Raises:
        DataError: There are too few or too many, they do not match the names, or the masks were saved with loss.
    """
    occurring = sorted({value for each in found for values in each.by_name.values() for value in values})
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
