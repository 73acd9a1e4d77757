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
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from samebits.data.keyed import IntArray
from samebits.recipes.pose.config import TestConfig
from samebits.recipes.pose.data import Maps

# Groups peaks into people by their tags.
#
# Associative embedding (Newell, Huang, Deng 2017) as in HigherHRNet's implementation: joint by joint, the peaks of one
# joint are assigned to the people so far, with the smallest sum of tag distances.
#
# Legend: P people, K joints, N peaks of one joint, T tags of a peak (2 with flip testing), M people so far.


AnyFloatArray = npt.NDArray[np.floating]
X = 0
Y = 1
SCORE = 2
TAGS = 3
# _TIE is the bonus of a pair below the threshold: less than the difference of two scores, more than rounding errors.
_FAR = 1e10
_TIE = 1e-9


def match(
    peaks: Sequence[AnyFloatArray],
    order: Sequence[int],
    *,
    max_people: int,
    tag_threshold: float,
) -> Maps:
    """Group peaks into people.

    Args:
        peaks: For each of K joints (N, 3 + T): x, y, score, tags; sorted by descending score.
        order: The joints in the order in which they are processed.
        max_people: Each peak is compared with the first `max_people` people. The result can have more people.
        tag_threshold: A peak with at least this distance from the mean tags of every person starts a new person.

    Returns:
        (P, K, 3 + T) float32, in the order in which the people were started; missing joints are all zeros.
    """
    num_joints = len(peaks)
    num_columns = peaks[0].shape[1] if len(peaks) else TAGS + 1
    capacity = sum(map(len, peaks))
    people = np.zeros((capacity, num_joints, num_columns), np.float32)
    sums = np.zeros((capacity, num_columns - TAGS), np.float32)
    counts = np.zeros(capacity, np.float32)
    # As in the reference, a person is identified by the value of the first tag: an equal one is the same person.
    numbers: dict[float, int] = {}
    for joint in order:
        found = peaks[joint]
        if len(found) == 0:
            continue
        rows = range(len(found))
        owners = [-1] * len(found)
        if numbers:
            known = min(len(numbers), max_people)
            means = sums[:known] / counts[:known, None]
            distances = tag_distances(found, means)
            is_near = distances < tag_threshold
            for row, column in assign(assignment_cost(distances, found), is_near):
                if is_near[row, column]:
                    owners[row] = column
        for row, owner in zip(rows, owners, strict=True):
            if owner >= 0:
                sums[owner] += found[row, TAGS:]
                counts[owner] += 1
            else:
                owner = numbers.setdefault(float(found[row, TAGS]), len(numbers))
                sums[owner] = found[row, TAGS:]
                counts[owner] = 1
            people[owner, joint] = found[row]
    return people[: len(numbers)]


def tag_distances(found: AnyFloatArray, means: AnyFloatArray) -> AnyFloatArray:
    """Compute (N, M) distances between the tags of (N, 3 + T) peaks and (M, T) mean tags."""
    difference = found[:, None, TAGS:].astype(np.float64) - means[None]
    return np.asarray(np.sqrt((difference * difference).sum(axis=2)))


def assignment_cost(distances: AnyFloatArray, found: AnyFloatArray) -> AnyFloatArray:
    """Compute the (N, M) cost of assigning a peak to a person: higher peaks choose first where distances tie.

    Args:
        distances: (N, M) tag distances.
        found: (N, 3 + T) peaks.
    """
    cost = np.rint(distances) * 100 - found[:, SCORE : SCORE + 1].astype(np.float64)
    # A diverged network may return NaN tags. Their peaks are then near to no person.
    return np.asarray(np.nan_to_num(cost, nan=_FAR, posinf=_FAR))


def assign(cost: AnyFloatArray, is_near: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Solve the assignment problem: pairs (peak, person) of the smallest total cost.

    Rounded distances often tie. If the tags of people lie on a line, shifting every peak to the next person costs the
    same as keeping all peaks and sending one far away, but it starts many new people instead of one. In the reference,
    the solution among equal ones depends on the version of the solver. Here it is one with the most pairs below the
    tag threshold.

    Args:
        cost: (N, M).
        is_near: (N, M), whether the distance of a pair is below the tag threshold.

    Returns:
        Pairs; with more peaks than people, some peaks have no pair.
    """
    rows, columns = linear_sum_assignment(cost - _TIE * is_near)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


# Numbers processed at once in the search for missing joints: they fit into the CPU cache, or fill a GPU.
_CHUNK_CPU = 1 << 18
_CHUNK_GPU = 1 << 24
_HOT = 0.05


def group_people(
    heat: Tensor, tags: Tensor, order: Sequence[int], config: TestConfig
) -> tuple[Maps, Maps]:
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
    heat = heat.float().contiguous()
    tags = tags.float().contiguous()
    peaks = top_k(
        heat,
        tags,
        find_peaks(heat, config.detection_threshold, config.nms_kernel),
        config.max_people,
    )
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
    flat = heat.view(-1)
    reach = kernel // 2
    mask = flat > threshold
    # On CPUs numpy is four times as fast as torch.
    places = (
        mask.nonzero().view(-1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))
    )
    y = places // width % height
    x = places % width
    values = flat[places]
    window = [
        (dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1) if dy or dx
    ]
    # Nearest offsets first: after the four direct neighbors, few pixels are left.
    for dy, dx in sorted(window, key=lambda step: step[0] ** 2 + step[1] ** 2):
        # Clamped to the border, whose pixels are in the window anyway.
        down = (y + dy).clamp_(0, height - 1) - y if dy else 0
        right = (x + dx).clamp_(0, width - 1) - x if dx else 0
        highest = values >= flat[places + down * width + right]
        places = places[highest]
        y = y[highest]
        x = x[highest]
        values = values[highest]
    return places


def top_k(heat: Tensor, tags: Tensor, places: Tensor, max_people: int) -> list[Maps]:
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


def adjust(people: Maps, heat: Tensor) -> Maps:
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


def refine(people: Maps, heat: Tensor, tags: Tensor) -> Maps:
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


def _search(heat: Tensor, tags: Tensor, means: Tensor, chunk: int) -> tuple[IntArray, Maps]:
    """Find, for (M, T) mean tags, the (M,) pixels with the largest heat minus rounded tag distance, and the values."""
    rows = max(1, chunk // len(heat))
    found = [
        _search_rows(heat, tags, means[first : first + rows])
        for first in range(0, len(means), rows)
    ]
    places, values = zip(*found, strict=True) if found else ([], [])
    return np.concatenate([np.zeros(0, np.int64), *places]), np.concatenate(
        [np.zeros(0, np.float32), *values]
    )


def _search_rows(heat: Tensor, tags: Tensor, means: Tensor) -> tuple[IntArray, Maps]:
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
    best = (
        values.argmax(dim=1) if values.is_cuda else torch.from_numpy(values.numpy().argmax(axis=1))
    )
    return best.cpu().numpy(), values.gather(1, best[:, None])[:, 0].cpu().numpy()


def _towards_higher(heat: Tensor, joint: IntArray, x: IntArray, y: IntArray) -> Maps:
    """Return (N, 2) pixel centers of (N,) joints, moved by a quarter towards the higher neighbor."""
    _, height, width = heat.shape
    above = np.maximum(y - 1, 0)
    below = np.minimum(y + 1, height - 1)
    left = np.maximum(x - 1, 0)
    right = np.minimum(x + 1, width - 1)
    rows = np.stack([y, y, above, below])
    columns = np.stack([left, right, x, x])
    left_of, right_of, above_of, below_of = _read(heat, (joint * height + rows) * width + columns)
    return np.column_stack(
        [
            x + 0.5 + np.where(right_of > left_of, 0.25, -0.25),
            y + 0.5 + np.where(below_of > above_of, 0.25, -0.25),
        ]
    ).astype(np.float32)


def _read(heat: Tensor, places: IntArray) -> Maps:
    values: Maps = heat.view(-1)[torch.from_numpy(places).to(heat.device)].cpu().numpy()
    return values
