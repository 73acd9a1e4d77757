"""Where a picture says nothing about keypoints: in crowds, and on people without any."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from faster_coco_eval.core import mask as coco_mask

from lockstep.errors import DataError
from lockstep.recipes.pose.affine import Floats, Pixels
from lockstep.recipes.pose.annotations import Annotations, Region, Runs


def draw_mask(annotations: Annotations, picture: int) -> Pixels | None:
    """What counts of a picture when it is trained on.

    Returns:
        (H, W), 255 where a pixel counts, 0 in crowds and on people without keypoints; None where all of it counts.

    Raises:
        DataError: A region does not fit the picture.
    """
    rows = range(*annotations.rows(picture).indices(len(annotations.people_ids)))
    hidden = [row for row in rows if row in annotations.regions]
    if not hidden:
        return None
    width, height = annotations.sizes[picture].tolist()
    runs: list[dict[str, Any]] = []
    for row in hidden:
        try:
            runs += _runs(annotations.regions[row], annotations.boxes[row], width, height)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"the region of annotation {annotations.people_ids[row]} does not fit its picture",
                where=f"picture {annotations.ids[picture]}, {width}x{height}",
                reason=error,
            ) from error
    # Joined as runs and decoded once: single pictures of each region would take several times as long.
    inside = coco_mask.decode(coco_mask.merge(runs))
    mask: Pixels = cv2.transpose(inside.T) - np.uint8(1)  # 0 becomes 255, and 1 becomes 0
    return mask


def _runs(region: Region | None, box: Floats, width: int, height: int) -> list[dict[str, Any]]:
    """A region as COCO's packed run lengths."""
    if region is None:
        left, top, wide, high = box.tolist()
        right, bottom = left + wide, top + high
        region = [np.array([left, top, right, top, right, bottom, left, bottom])]
    if isinstance(region, Runs):
        if (region.width, region.height) != (width, height):
            raise ValueError(f"its run lengths are of {region.width}x{region.height}")
        if isinstance(region.counts, str):
            return [{"size": [height, width], "counts": region.counts}]
        if region.counts.min(initial=0) < 0 or region.counts.sum() != width * height:
            raise ValueError(f"its run lengths add up to {region.counts.sum():,}, not {width * height:,}")
        return [coco_mask.frPyObjects({"size": [height, width], "counts": region.counts.tolist()}, height, width)]
    return list(coco_mask.frPyObjects([outline.tolist() for outline in region], height, width))
