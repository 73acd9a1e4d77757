"""Draw regions of COCO's annotations into masks, within a limit on the length of their outlines."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from faster_coco_eval import COCO
from faster_coco_eval.core import mask as coco_mask

from samebits.data.coco.annotations import check_region
from samebits.data.images import ByteArray
from samebits.errors import DataError

# COCO's encoder follows outlines point by point, also outside of an image, and takes some 200 bytes for a pixel.
MAX_OUTLINE_PX = 1_000_000
MAX_OUTLINES_PX = 10_000_000  # of all regions of an image


def draw_regions(coco: COCO, annotations: Iterable[Mapping[str, Any]], image_id: int) -> ByteArray:
    """Draw regions of an image into one mask (H, W) of 0 and 1; an annotation without a region is drawn as its box.

    Raises:
        DataError: A region has another form, or does not fit the image.
    """
    image = coco.imgs[image_id]
    height, width = image["height"], image["width"]
    left_px, runs = MAX_OUTLINES_PX, []
    for annotation in annotations:
        region: Any = annotation.get("segmentation")
        if not region and "bbox" in annotation:
            left, top, width_px, height_px = annotation["bbox"]
            right, bottom = left + width_px, top + height_px
            region = [[left, top, right, top, right, bottom, left, bottom]]
        try:
            check_region(region)
            if isinstance(region, dict):
                _check_runs(region, height, width)
            else:
                left_px -= _outline_px(region, height, width)
                if left_px < 0:
                    raise ValueError(f"with those before it, its outline is longer than {MAX_OUTLINES_PX:,} pixels")
            runs.append(coco.annToRLE({"image_id": image_id, "segmentation": region}))
            if isinstance(region, dict):
                coco_mask.decode(runs[-1])  # raises if its text stands for another number of pixels
        except (ValueError, TypeError, RuntimeError) as error:
            raise DataError(
                f"the region of annotation {annotation['id']} does not fit its image",
                where=f"image {image_id}, {width}x{height}",
                cause=error,
                fix="Correct the annotation file.",
            ) from error
    if not runs:
        return np.zeros((height, width), np.uint8)
    return np.ascontiguousarray(coco_mask.decode(coco_mask.merge(runs)), dtype=np.uint8)


def _check_runs(region: Mapping[str, Any], height: int, width: int) -> None:
    if list(region["size"]) != [height, width]:
        raise ValueError(f"its run lengths are of {region['size'][1]}x{region['size'][0]}")
    counts = region["counts"]
    if isinstance(counts, str):
        if not counts.isascii():
            raise ValueError("its run lengths are not COCO's text")
    elif sum(counts) != height * width:
        raise ValueError(f"its run lengths add up to {sum(counts):,}, not {width * height:,}")


def _outline_px(outlines: list[list[float]], height: int, width: int) -> int:
    """Return the number of pixels on closed outlines."""
    total = 0.0
    for outline in outlines:
        points = np.array(outline[: len(outline) // 2 * 2], np.float64).reshape(-1, 2)
        if np.abs(points).max() > 100 * max(width, height):
            raise ValueError("it lies far outside of it")
        total += float(np.abs(points - np.roll(points, 1, axis=0)).max(axis=1).sum())
    if total > MAX_OUTLINE_PX:
        raise ValueError(f"its outline is longer than {MAX_OUTLINE_PX:,} pixels")
    return int(total)
