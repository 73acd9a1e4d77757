"""Masks of crowds and of people without keypoints, which the loss ignores."""

from __future__ import annotations

from typing import Any

import numpy as np
from faster_coco_eval.core import mask as coco_mask

from lockstep.data.opencv import cv2
from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Floats, Pixels
from lockstep.recipes.pose.coco.annotations import Annotations, Outlines, Runs

# Outlines are followed point by point, also outside of an image: one that leads far away would take all memory.
_MAX_TIMES_OUTSIDE = 100
MAX_OUTLINE_PX = 1_000_000  # of a region; following it takes some 200 bytes a pixel
_MAX_OUTLINES_PX = 10_000_000  # of all regions of an image; each is kept as run lengths until all are joined


def draw_mask(annotations: Annotations, image: int) -> Pixels | None:
    """Draw the loss mask of an image.

    Returns:
        (H, W), 255 where a pixel counts, 0 in crowds and on people without keypoints; None where all of it counts.

    Raises:
        DataError: A region does not fit the image.
    """
    rows = range(*annotations.rows(image).indices(len(annotations.people_ids)))
    hidden = [row for row in rows if row in annotations.regions]
    if not hidden:
        return None
    width, height = annotations.sizes[image].tolist()
    inside: Pixels = np.zeros((width, height), dtype=np.uint8)  # run lengths go down the columns
    runs: list[dict[str, Any]] = []
    left_px = float(_MAX_OUTLINES_PX)
    for row in hidden:
        try:
            region = annotations.regions[row]
            if isinstance(region, Runs):
                np.bitwise_or(inside, _drawn(region, width, height), out=inside)
            else:
                outlined, length = _outlined(region, annotations.boxes[row], width, height)
                runs += outlined
                left_px -= length
                if left_px < 0:
                    raise ValueError(f"with those before it, its outline is longer than {_MAX_OUTLINES_PX:,} pixels")
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the region of annotation {annotations.people_ids[row]} does not fit its image",
                where=f"image {annotations.ids[image]}, {width}x{height}",
                cause=error,
                fix="Correct the annotation file.",
            ) from error
    if runs:
        # Joined as runs and decoded once: single images of each region would take several times as long.
        inside |= np.asarray(coco_mask.decode(coco_mask.merge(runs)).T, np.uint8)
    return np.asarray(cv2.transpose(inside), np.uint8) - np.uint8(1)  # 0 becomes 255, and 1 becomes 0


def _drawn(region: Runs, width: int, height: int) -> Pixels:
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
    colours: Pixels = (np.arange(len(counts)) & 1).astype(np.uint8)
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
