"""Masks of crowds and of people without keypoints, which the loss ignores."""

from __future__ import annotations

import numpy as np

from samebits.data.coco.regions import Annotated, draw_regions
from samebits.recipes.pose.affine import Pixels
from samebits.recipes.pose.coco.annotations import Annotations


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
    regions = (
        Annotated(int(annotations.people_ids[row]), annotations.regions[row], annotations.boxes[row]) for row in hidden
    )
    inside, _ = draw_regions(regions, (width, height), annotations.ids[image])
    return inside - np.uint8(1)  # 0 becomes 255, and 1 becomes 0
