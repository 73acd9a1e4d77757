"""What the network should say of an image: heatmaps with a peak at each joint, and where each person's joints lie.

Both as the HigherHRNet authors' implementation has them. Points are cut to whole pixels towards zero: x = -0.4 still
lies on pixel 0, x = -1 lies outside.

Legend: P people, K joints, R a map's height and width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lockstep.data.keyed import IntArray
from lockstep.recipes.pose.affine import Floats

Maps = npt.NDArray[np.float32]
MIN_SIGMA = 0.25


def joints_on_map(joints: Floats, size_px: int) -> tuple[IntArray, IntArray, IntArray]:
    """The joints that are visible and on the map.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible (counts where more than 0).
        size_px: R.

    Returns:
        Of each of them: its person, its place among the K, and its pixel (x, y), cut towards zero. Person by person.
    """
    num_joints = joints.shape[1]
    flat = joints.reshape(-1, joints.shape[2])
    x, y = flat[:, 0], flat[:, 1]
    # Compared before they are cut: a number far outside would not fit an integer.
    (there,) = ((flat[:, 2] > 0) & (x > -1) & (y > -1) & (x < size_px) & (y < size_px)).nonzero()
    people, kinds = np.divmod(there, num_joints)
    return people, kinds, flat.take(there, axis=0)[:, :2].astype(np.int64)


def draw_heatmaps(joints: Floats, sigmas: float | Floats, size_px: int, out: Maps | None = None) -> Maps:
    """A peak of height 1 for each joint; where two overlap, the larger value.

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.
        sigmas: Spread of the peaks, pixels of the map: one for all, or (P,).
        size_px: R.
        out: (K, R, R) zeros to draw on.

    Returns:
        (K, R, R).
    """
    maps = np.zeros((joints.shape[1], size_px, size_px), np.float32) if out is None else out
    people, kinds, pixels = joints_on_map(joints, size_px)
    if not len(people):
        return maps
    if isinstance(sigmas, float):
        places, values = _spots(kinds, pixels, sigmas, size_px)
    else:
        spreads = np.clip(sigmas, MIN_SIGMA, size_px)[people]  # wider than the map it would only take memory
        groups = [(spreads == sigma, float(sigma)) for sigma in np.unique(spreads)]
        spots = [_spots(kinds[mine], pixels[mine], sigma, size_px) for mine, sigma in groups]
        places, values = (np.concatenate([part.ravel() for part in parts]) for parts in zip(*spots, strict=True))
        rising = np.argsort(values, kind="stable")
        places, values = places[rising], values[rising]
    # Of several values for one place numpy keeps the last, and they rise: a maximum without a loop over joints.
    maps.reshape(-1)[places] = values
    return maps


def index_joints(joints: Floats, size_px: int, max_people: int, *, tag_per_joint: bool = True) -> IntArray:
    """Where each person's joints lie in the flattened maps of tags.

    Where there are more than `max_people`, those with the most joints on the map stay, in their order; the others are
    not told apart in this image, but keep their peaks. (The reference stops with an IndexError.)

    Args:
        joints: (P, K, 3 or more): x, y in pixels of the map, visible.
        size_px: R.
        max_people: Room in the result.
        tag_per_joint: Each joint has a map of tags of its own.

    Returns:
        (max_people, K, 2): place (joint * R^2 + y * R + x, or y * R + x with one map for all) and 1, the joints that
        are on the map first; the rest is zero.
    """
    index = np.zeros((max_people, joints.shape[1], 2), np.int64)
    people, kinds, pixels = joints_on_map(joints, size_px)
    if len(joints) > max_people:
        counts = np.bincount(people, minlength=len(joints))
        chosen = np.sort(np.argsort(-counts, kind="stable")[:max_people])
        stays = np.isin(people, chosen)
        people, kinds, pixels = np.searchsorted(chosen, people[stays]), kinds[stays], pixels[stays]
    flat = pixels[:, 1] * size_px + pixels[:, 0]
    if tag_per_joint:
        flat += kinds * size_px**2
    places = np.arange(len(people)) - people.searchsorted(people)
    index[people, places, 0] = flat
    index[people, places, 1] = 1
    return index


def _spots(kinds: IntArray, pixels: IntArray, sigma: float, size_px: int) -> tuple[IntArray, Maps]:
    """Where peaks of one spread go in the flattened maps, and what goes there, by rising value; both flat."""
    patch, reach = _patch(sigma), 3 * sigma
    starts = kinds * size_px**2
    if reach.is_integer():
        # Beyond the border the border is written to: its own value is higher, and comes later.
        columns, rows = near = np.add.outer(np.arange(patch.side) - int(reach + 1), pixels).transpose(2, 0, 1)
        np.minimum(np.maximum(near, 0, out=near), size_px - 1, out=near)
        rows *= size_px
        rows += starts
        places = rows.take(patch.down, axis=0)
        places += columns.take(patch.right, axis=0)
        # Both flat: numpy assigns flat arrays twice as fast as broadcast ones.
        return places.reshape(-1), patch.values.repeat(len(kinds))
    # Rounded as the reference does: with a broken sigma, a patch is not quite centred on its pixel, and may be cut.
    firsts = np.round(pixels - (reach + 1)).astype(np.int64)
    lasts = np.minimum(np.round(pixels + (reach + 2)).astype(np.int64), size_px)
    rows, columns = patch.down[:, None] + firsts[:, 1], patch.right[:, None] + firsts[:, 0]
    inside = (rows >= 0) & (columns >= 0) & (rows < lasts[:, 1]) & (columns < lasts[:, 0])
    places = rows * size_px + columns + starts
    return places[inside], np.broadcast_to(patch.values, places.shape)[inside]


class _Patch(NamedTuple):
    """A gaussian of height 1 on a square of `side` pixels: (side^2,) rows and columns, (side^2, 1) values, rising."""

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
