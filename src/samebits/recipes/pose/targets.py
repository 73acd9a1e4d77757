"""Training targets: heatmaps with a peak at each joint, and the indices of each person's joints.

Both as in the HigherHRNet authors' implementation. Points are truncated towards zero: x = -0.4 is on pixel 0, x = -1 is
outside.

Legend: P people, K joints, R height and width of a map.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from samebits.data.keyed import IntArray
from samebits.recipes.pose.affine import Floats

Maps = npt.NDArray[np.float32]


def joints_on_map(joints: Floats, size_px: int) -> tuple[IntArray, IntArray, IntArray]:
    """Select the joints that are visible and on the map.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible (if above 0).

    Returns:
        For each of M joints, sorted by person: (M,) the person, (M,) the joint, and (M, 2) the pixel (x, y).
    """
    num_joints = joints.shape[1]
    flat = joints.reshape(-1, joints.shape[2])
    x, y = flat[:, 0], flat[:, 1]
    # Compared before the truncation: a number far outside would not fit into an integer.
    (on_map,) = ((flat[:, 2] > 0) & (x > -1) & (y > -1) & (x < size_px) & (y < size_px)).nonzero()
    people, kinds = np.divmod(on_map, num_joints)
    return people, kinds, flat.take(on_map, axis=0)[:, :2].astype(np.int64)


def draw_heatmaps(joints: Floats, sigma: float, size_px: int, out: Maps | None = None) -> Maps:
    """Draw a Gaussian peak of height 1 for each joint; where peaks overlap, the larger value.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.
        sigma: Standard deviation of the peaks, in pixels of the map.
        out: (K, R, R) zeros to draw on. None: allocate.

    Returns:
        (K, R, R).
    """
    maps = np.zeros((joints.shape[1], size_px, size_px), np.float32) if out is None else out
    _, kinds, pixels = joints_on_map(joints, size_px)
    if not len(kinds):
        return maps
    places, values = _spots(kinds, pixels, sigma, size_px)
    # numpy keeps the last of several values for one index, and values ascend: a maximum without a loop over joints.
    maps.reshape(-1)[places] = values
    return maps


def index_joints(joints: Floats, size_px: int, max_people: int) -> IntArray:
    """Compute the indices of each person's joints into the flattened tag maps.

    If there are more than `max_people`, those with the most joints on the map are kept, in their order. The others
    have no tag loss in this image, but keep their peaks. (The reference raises an IndexError.)

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.

    Returns:
        (max_people, K, 2): index (joint * R^2 + y * R + x, or y * R + x with one map for all joints) and 1, for the
        joints on the map; the rest is zero.
    """
    index = np.zeros((max_people, joints.shape[1], 2), np.int64)
    people, kinds, pixels = joints_on_map(joints, size_px)
    if len(joints) > max_people:
        counts = np.bincount(people, minlength=len(joints))
        chosen = np.sort(np.argsort(-counts, kind="stable")[:max_people])
        stays = np.isin(people, chosen)
        people, kinds, pixels = np.searchsorted(chosen, people[stays]), kinds[stays], pixels[stays]
    flat = (kinds * size_px + pixels[:, 1]) * size_px + pixels[:, 0]
    places = np.arange(len(people)) - people.searchsorted(people)
    index[people, places, 0] = flat
    index[people, places, 1] = 1
    return index


def _spots(kinds: IntArray, pixels: IntArray, sigma: float, size_px: int) -> tuple[IntArray, Maps]:
    """Compute indices into the flattened maps and values of peaks of one sigma, by ascending value; both flat."""
    patch, reach = _patch(sigma), 3 * sigma
    starts = kinds * size_px**2
    if reach.is_integer():
        # Indices beyond the border are clamped to it. Its own value is higher and is written later.
        columns, rows = near = np.add.outer(np.arange(patch.side) - int(reach + 1), pixels).transpose(2, 0, 1)
        np.minimum(np.maximum(near, 0, out=near), size_px - 1, out=near)
        rows *= size_px
        rows += starts
        places = rows.take(patch.down, axis=0)
        places += columns.take(patch.right, axis=0)
        # Both flat: numpy assigns flat arrays twice as fast as broadcast ones.
        return places.reshape(-1), patch.values.repeat(len(kinds))
    # Rounded as in the reference: if 3 * sigma is not whole, a patch is slightly off center and may be cut.
    firsts = np.round(pixels - (reach + 1)).astype(np.int64)
    lasts = np.minimum(np.round(pixels + (reach + 2)).astype(np.int64), size_px)
    rows, columns = patch.down[:, None] + firsts[:, 1], patch.right[:, None] + firsts[:, 0]
    inside = (rows >= 0) & (columns >= 0) & (rows < lasts[:, 1]) & (columns < lasts[:, 0])
    places = rows * size_px + columns + starts
    return places[inside], np.broadcast_to(patch.values, places.shape)[inside]


class _Patch(NamedTuple):
    """A Gaussian of height 1 on a square of `side` pixels: (side^2,) rows and columns, (side^2, 1) ascending values."""

    down: IntArray
    right: IntArray
    values: Maps
    side: int


@lru_cache(maxsize=256)
def _patch(sigma: float) -> _Patch:
    offsets = np.arange(0, 6 * sigma + 3) - (3 * sigma + 1)
    squares = offsets**2
    values = np.exp(-(squares[:, None] + squares[None, :]) / (2 * sigma**2)).astype(np.float32).reshape(-1)
    order = np.argsort(values, kind="stable")
    down, right = np.divmod(order, len(offsets))
    return _Patch(down, right, values[order, None], len(offsets))
