"""Regions of COCO's annotations: polygons and run lengths, read within limits and drawn into masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from faster_coco_eval.core import mask as coco_mask

from samebits.data.coco.fields import Fields, Floats
from samebits.data.images import ByteArray
from samebits.data.keyed import IntArray
from samebits.data.opencv import cv2
from samebits.errors import DataError

# Outlines are followed point by point, also outside of an image: one that leads far away would take all memory.
_MAX_TIMES_OUTSIDE = 100
MAX_OUTLINE_PX = 1_000_000  # of a region; following it takes some 200 bytes a pixel
MAX_OUTLINES_PX = 10_000_000  # of all regions of an image; each is kept as run lengths until all are joined


@dataclass(frozen=True)
class Runs:
    """A region as run lengths, column by column: so many pixels outside, so many inside, and so on.

    Attributes:
        counts: The lengths, or COCO's text for them.
        height: Of the image, pixels.
        width: Of the image, pixels.
    """

    counts: IntArray | str
    height: int
    width: int


Outlines = list[Floats]  # each x, y, x, y ...
Region = Runs | Outlines


class Annotated(NamedTuple):
    """The region of one annotation.

    Attributes:
        number: Number of the annotation.
        region: Its region. None: the file has only a box.
        box: (4,) x, y, width, height, pixels.
    """

    number: int
    region: Region | None
    box: Floats


def read_region(fields: Fields, place: int) -> Region | None:
    """Read the region of an entry as arrays, which take a tenth of the memory.

    Args:
        fields: The entries.
        place: Index of the entry.

    Returns:
        The region; None if the entry has none.

    Raises:
        DataError: It is neither polygons nor run lengths.
    """
    region = fields.value(place, "segmentation")
    if not region:
        return None
    try:
        if isinstance(region, dict):
            counts = region["counts"]
            runs = counts if isinstance(counts, str) else np.array(counts, dtype=np.int64)
            return Runs(runs, height=int(region["size"][0]), width=int(region["size"][1]))
        outlines = [np.array(outline, dtype=np.float64) for outline in region]
        if all(outline.ndim == 1 and len(outline) >= 6 and np.isfinite(outline).all() for outline in outlines):
            return outlines
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        pass
    raise fields.wrong(
        place,
        "segmentation",
        "polygons of at least three points, of finite numbers, or run lengths with size and counts",
    )


def draw_regions(
    found: Iterable[Annotated], size: tuple[int, int], image: int, *, left_px: float = MAX_OUTLINES_PX
) -> tuple[ByteArray, float]:
    """Draw regions of an image into one mask.

    Args:
        found: The regions.
        size: (width, height) of the image, pixels.
        image: Number of the image, for errors.
        left_px: Largest length of all outlines together, pixels.

    Returns:
        (H, W), 1 inside of a region, 0 elsewhere; and what is left of the length.

    Raises:
        DataError: A region does not fit the image.
    """
    width, height = size
    inside: ByteArray = np.zeros((width, height), dtype=np.uint8)  # run lengths go down the columns
    runs: list[dict[str, Any]] = []
    for number, region, box in found:
        try:
            if isinstance(region, Runs):
                np.bitwise_or(inside, _drawn(region, width, height), out=inside)
            else:
                outlined, length = _outlined(region, box, width, height)
                runs += outlined
                left_px -= length
                if left_px < 0:
                    raise ValueError(f"with those before it, its outline is longer than {MAX_OUTLINES_PX:,} pixels")
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the region of annotation {number} does not fit its image",
                where=f"image {image}, {width}x{height}",
                cause=error,
                fix="Correct the annotation file.",
            ) from error
    if runs:
        # Joined as runs and decoded once: single images of each region would take several times as long.
        inside |= np.asarray(coco_mask.decode(coco_mask.merge(runs)).T, np.uint8)
    return np.asarray(cv2.transpose(inside), np.uint8), left_px


def _drawn(region: Runs, width: int, height: int) -> ByteArray:
    """(W, H), 1 in a region of run lengths."""
    if (region.width, region.height) != (width, height):
        raise ValueError(f"its run lengths are of {region.width}x{region.height}")
    if isinstance(region.counts, str):
        if not region.counts.isascii():
            raise ValueError("its run lengths are not COCO's text")
        return np.asarray(coco_mask.decode({"size": [height, width], "counts": region.counts}).T, np.uint8)
    counts = np.asarray(region.counts)
    # In floats first: a sum of 64 bits can wrap to the right number.
    total = counts.sum(dtype=np.float64)
    if counts.min(initial=0) < 0 or total > 2**53 or counts.sum() != width * height:
        raise ValueError(f"its run lengths add up to {total:,.0f}, not {width * height:,}")
    colours: ByteArray = (np.arange(len(counts)) & 1).astype(np.uint8)
    return colours.repeat(counts).reshape(width, height)


def _outlined(region: Outlines | None, box: Floats, width: int, height: int) -> tuple[list[dict[str, Any]], float]:
    """Convert a region's outlines, or its box if it has none, to COCO's packed run lengths; and return their length."""
    if region is None:
        left, top, wide, high = box.tolist()
        right, bottom = left + wide, top + high
        region = [np.array([left, top, right, top, right, bottom, left, bottom])]
    if max(float(np.abs(outline).max()) for outline in region) > _MAX_TIMES_OUTSIDE * max(width, height):
        raise ValueError("it lies far outside of it")
    length = sum(map(_length, region))
    if length > MAX_OUTLINE_PX:
        raise ValueError(f"its outline is longer than {MAX_OUTLINE_PX:,} pixels")
    return list(coco_mask.frPyObjects([outline.tolist() for outline in region], height, width)), length


def _length(outline: Floats) -> float:
    """Return the number of pixels on a closed outline."""
    points = outline[: len(outline) // 2 * 2].reshape(-1, 2)
    return float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())
