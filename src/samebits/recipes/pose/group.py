"""From heatmaps and tag maps to people: non-maximum suppression, top-k, grouping, adjustment, refinement.

The results equal those of HigherHRNet's implementation (`HeatmapParser.parse`), but faster: peaks are searched only
among the pixels above the threshold instead of by pooling whole maps, and all people and joints are adjusted at once.
Maps may be on any device. Results are numpy arrays.

    heatmaps -> find_peaks -> top_k -> match (assign.py) -> adjust -> refine -> people
    tag maps -----------------^         ^                             ^

Legend: P people, K joints, H and W of the maps in pixels, T tag maps (2 with flip testing).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samebits.recipes.pose.assign import SCORE, TAGS, X, Y, match
from samebits.recipes.pose.config import TestConfig

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
# Numbers processed at once in the search for missing joints: they fit into the CPU cache, or fill a GPU.
_CHUNK_CPU, _CHUNK_GPU = 1 << 18, 1 << 24
_HOT = 0.05


def group_people(heat: Tensor, tags: Tensor, order: Sequence[int], config: TestConfig) -> tuple[FloatArray, FloatArray]:
    """Find all people.

    Args:
        heat: (K, H, W) float heatmaps.
        tags: (T, K, H, W) tags.
        order: The K joints in the order in which they are grouped, the most reliable first.

    Returns:
        (P, K, 3 + T) x, y, score, tags in pixels of the maps; missing joints are all zeros. As in the reference, the
        center of a pixel is at +0.5 after adjustment or refinement, and at +0 otherwise. And (P,) scores, the mean
        over all K joints before refinement.
    """
    # contiguous, since one index addresses a pixel of all maps.
    heat, tags = heat.float().contiguous(), tags.float().contiguous()
    peaks = top_k(heat, tags, find_peaks(heat, config.detection_threshold, config.nms_kernel), config.max_people)
    people = match(peaks, order, max_people=config.max_people, tag_threshold=config.tag_threshold)
    found = adjust(people, heat) if config.adjust else people
    scores = found[:, :, SCORE].mean(axis=1)
    return (refine(found, heat, tags) if config.refine else found), scores


def find_peaks(heat: Tensor, threshold: float, kernel: int) -> Tensor:
    """Find the pixels above `threshold` (>= 0) that are the maximum of the window around them.

    Args:
        heat: (K, H, W), contiguous.
        threshold: Minimum height of a peak, exclusive.
        kernel: Side of the window, odd.

    Returns:
        Indices into the flattened maps, ascending. Equal neighbors are all kept.
    """
    _, height, width = heat.shape
    flat, reach = heat.view(-1), kernel // 2
    mask = flat > threshold
    # On CPUs numpy is four times as fast as torch.
    places = mask.nonzero().view(-1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))
    y, x = places // width % height, places % width
    values = flat[places]
    window = [(dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1) if dy or dx]
    # Nearest offsets first: after the four direct neighbors, few pixels are left.
    for dy, dx in sorted(window, key=lambda step: step[0] ** 2 + step[1] ** 2):
        # Clamped to the border, whose pixels are in the window anyway.
        down = (y + dy).clamp_(0, height - 1) - y if dy else 0
        right = (x + dx).clamp_(0, width - 1) - x if dx else 0
        highest = values >= flat[places + down * width + right]
        places, y, x, values = places[highest], y[highest], x[highest], values[highest]
    return places


def top_k(heat: Tensor, tags: Tensor, places: Tensor, max_people: int) -> list[FloatArray]:
    """Select the highest peaks of each joint.

    Args:
        heat: (K, H, W), contiguous.
        tags: (T, K, H, W), contiguous.

    Returns:
        K arrays (N, 3 + T): x, y, score, tags; by descending score, ties in row-major order.
    """
    num_joints, height, width = heat.shape
    area = height * width
    # One transfer for heights and tags: on a GPU each one waits for the device.
    values = torch.cat([heat.view(1, -1)[:, places], tags.flatten(1)[:, places]]).cpu().numpy()
    spots = places.cpu().numpy()
    joints = spots // area
    ranked = np.lexsort((-values[0], joints))
    starts = np.searchsorted(joints[ranked], np.arange(num_joints + 1))
    peaks = []
    for first, end in pairwise(starts):
        chosen = ranked[first : min(first + max_people, end)]
        y, x = np.divmod(spots[chosen] % area, width)
        peaks.append(np.column_stack([x, y, values[:, chosen].T]).astype(np.float32))
    return peaks


def adjust(people: FloatArray, heat: Tensor) -> FloatArray:
    """Move each joint to the pixel center and a quarter pixel towards the higher neighbor (ties: left, up).

    Args:
        people: (P, K, 3 + T), x and y are whole numbers.
        heat: (K, H, W).

    Returns:
        A changed copy.
    """
    person, joint = np.nonzero(people[:, :, SCORE] > 0)
    moved = people.copy()
    x, y = (people[person, joint, axis].astype(np.int64) for axis in (X, Y))
    moved[person, joint, : TAGS - 1] = _towards_higher(heat, joint, x, y)
    return moved


def refine(people: FloatArray, heat: Tensor, tags: Tensor) -> FloatArray:
    """Add the missing joints of each person where the heatmap minus the rounded tag distance is highest.

    A joint is added only where its heatmap is above 0.

    Args:
        people: (P, K, 3 + T), from `match` or `adjust`.
        heat: (K, H, W).
        tags: (T, K, H, W).

    Returns:
        A changed copy; the tags of added joints stay zero.
    """
    _, height, width = heat.shape
    found = people[:, :, SCORE] > 0
    num_found = found.sum(axis=1, dtype=np.float32)
    means = torch.from_numpy(people[:, :, TAGS:].sum(axis=1) / num_found[:, None]).to(heat.device)
    places = np.zeros(found.shape, np.int64)
    for joint_number, missing in enumerate(map(np.flatnonzero, ~found.T)):
        if len(missing):
            wanted = means[torch.from_numpy(missing)]
            maps = heat[joint_number].view(-1), tags[:, joint_number].flatten(1)
            places[missing, joint_number] = _best_places(*maps, wanted)
    person, joint = np.nonzero(~found)
    y, x = np.divmod(places[person, joint], width)
    heights = _read(heat, (joint * height + y) * width + x)
    warm = heights > 0
    filled = people.copy()
    filled[person[warm], joint[warm], :SCORE] = _towards_higher(heat, joint, x, y)[warm]
    filled[person[warm], joint[warm], SCORE] = heights[warm]
    return filled


def _best_places(heat: Tensor, tags: Tensor, means: Tensor) -> IntArray:
    """Find the (M,) best pixels of one joint for (M, T) mean tags, from (HW,) heat and (T, HW) tags."""
    if heat.is_cuda:
        return _search(heat, tags, means, _CHUNK_GPU)[0]
    # The value of a pixel is at most its heat. So if the best pixel above _HOT has a value above _HOT, no other pixel
    # can be better, and most maps need not be searched completely.
    hot = torch.from_numpy(np.flatnonzero(heat.numpy() > _HOT))
    if len(hot) == 0:
        return _search(heat, tags, means, _CHUNK_CPU)[0]
    best, values = _search(heat[hot], tags[:, hot], means, _CHUNK_CPU)
    best = hot.numpy()[best]
    unsure = np.flatnonzero(values <= _HOT)
    best[unsure] = _search(heat, tags, means[torch.from_numpy(unsure)], _CHUNK_CPU)[0]
    return best


def _search(heat: Tensor, tags: Tensor, means: Tensor, chunk: int) -> tuple[IntArray, FloatArray]:
    """Find, for (M, T) mean tags, the (M,) pixels with the largest heat minus rounded tag distance, and the values."""
    rows = max(1, chunk // len(heat))
    found = [_search_rows(heat, tags, means[first : first + rows]) for first in range(0, len(means), rows)]
    places, values = zip(*found, strict=True) if found else ([], [])
    return np.concatenate([np.zeros(0, np.int64), *places]), np.concatenate([np.zeros(0, np.float32), *values])


def _search_rows(heat: Tensor, tags: Tensor, means: Tensor) -> tuple[IntArray, FloatArray]:
    distances = tags[:1] - means[:, :1]
    if len(tags) == 1:
        distances.abs_()
    else:
        distances.square_()
        for tag, mean in zip(tags[1:], means.T[1:], strict=True):
            distances += (tag - mean[:, None]).square_()
        distances.sqrt_()
    values = torch.sub(heat, distances.round_(), out=distances)
    # Both return the first of equal values. On CPUs numpy is four times as fast.
    best = values.argmax(dim=1) if values.is_cuda else torch.from_numpy(values.numpy().argmax(axis=1))
    return best.cpu().numpy(), values.gather(1, best[:, None])[:, 0].cpu().numpy()


def _towards_higher(heat: Tensor, joint: IntArray, x: IntArray, y: IntArray) -> FloatArray:
    """Return (N, 2) pixel centers of (N,) joints, moved by a quarter towards the higher neighbor."""
    _, height, width = heat.shape
    above, below = np.maximum(y - 1, 0), np.minimum(y + 1, height - 1)
    left, right = np.maximum(x - 1, 0), np.minimum(x + 1, width - 1)
    rows = np.stack([y, y, above, below])
    columns = np.stack([left, right, x, x])
    left_of, right_of, above_of, below_of = _read(heat, (joint * height + rows) * width + columns)
    return np.column_stack(
        [x + 0.5 + np.where(right_of > left_of, 0.25, -0.25), y + 0.5 + np.where(below_of > above_of, 0.25, -0.25)]
    ).astype(np.float32)


def _read(heat: Tensor, places: IntArray) -> FloatArray:
    values: FloatArray = heat.view(-1)[torch.from_numpy(places).to(heat.device)].cpu().numpy()
    return values
