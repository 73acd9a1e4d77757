"""From heatmaps and tag maps to people: suppression, top-k, grouping, adjusting, refining.

The same people as HigherHRNet's implementation (`HeatmapParser.parse`) finds, by other means: peaks are looked for only
among the pixels above the threshold instead of by pooling whole maps, and all people and joints are adjusted at once.
Maps may lie on any device; what is found comes back as numpy arrays.

Legend: P people, K joints, H and W of the maps in pixels, T tag maps (2 with the mirrored image's).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.recipes.pose.assign import SCORE, TAGS, X, Y, match

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
# How many numbers are worked on at once while joints are looked for: what a CPU's cache or a GPU likes.
_CHUNK_CPU, _CHUNK_GPU = 1 << 18, 1 << 24
_HOT = 0.05


@dataclass(frozen=True)
class Grouping:
    """How maps become people.

    Attributes:
        order: The K joints in the order in which they are grouped, the surest first.
        max_people: Peaks kept of each joint, the highest; and people that a peak is compared with.
        detection_threshold: A peak is higher than this; not negative.
        tag_threshold: Tags of one person lie nearer to their mean than this.
        use_detection_value: Round tag distances and let a peak's height decide among equal ones.
        ignore_too_much: Stop taking in joints when `max_people` people are found.
        nms_kernel: Side of the window in which a peak is the highest pixel; odd.
        adjust: Move joints a quarter pixel towards the higher neighbour.
        refine: Look for the user's missing joints wherever the tags fit.
    """

    order: Sequence[int]
    max_people: int = 30
    detection_threshold: float = 0.1
    tag_threshold: float = 1.0
    use_detection_value: bool = True
    ignore_too_much: bool = False
    nms_kernel: int = 5
    adjust: bool = True
    refine: bool = True

    def people(self, heat: Tensor, tags: Tensor) -> tuple[FloatArray, FloatArray]:
        """Find everybody.

        Args:
            heat: (K, H, W) float heatmaps.
            tags: (T, K, H, W) tags, or (T, 1, H, W) shared by all joints.

        Returns:
            (P, K, 3 + T) x, y, score, tags in pixels of the maps (a pixel's centre is at +0.5 after adjusting or
            refining, its corner otherwise, as in the reference), missing joints all zero; and (P,) scores, each the
            mean over all K joints before refining.
        """
        heat, tags = heat.float().contiguous(), tags.float().contiguous()
        people = match(
            top_k(heat, tags, find_peaks(heat, self.detection_threshold, self.nms_kernel), self.max_people),
            self.order,
            max_people=self.max_people,
            tag_threshold=self.tag_threshold,
            use_score=self.use_detection_value,
            ignore_too_much=self.ignore_too_much,
        )
        found = adjust(people, heat) if self.adjust else people
        scores = found[:, :, SCORE].mean(axis=1)
        return (refine(found, heat, tags) if self.refine else found), scores


def find_peaks(heat: Tensor, threshold: float, kernel: int) -> Tensor:
    """Pixels above `threshold` (>= 0) that no pixel in the window around them exceeds.

    Args:
        heat: (K, H, W), contiguous.
        threshold: Height that a peak has to exceed.
        kernel: Side of the window, odd.

    Returns:
        Places in the flattened maps, rising. Equal neighbours are all kept.
    """
    _, height, width = heat.shape
    flat, reach = heat.view(-1), kernel // 2
    places = _nonzero(flat > threshold)
    y, x = places // width % height, places % width
    values = flat[places]
    window = [(dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1) if dy or dx]
    # Nearest first: after the four direct neighbours hardly a pixel is left.
    for dy, dx in sorted(window, key=lambda step: step[0] ** 2 + step[1] ** 2):
        # Beyond the border the border itself is looked at: it is in the window too.
        down = (y + dy).clamp_(0, height - 1) - y if dy else 0
        right = (x + dx).clamp_(0, width - 1) - x if dx else 0
        highest = values >= flat[places + down * width + right]
        places, y, x, values = places[highest], y[highest], x[highest], values[highest]
    return places


def top_k(heat: Tensor, tags: Tensor, places: Tensor, max_people: int) -> list[FloatArray]:
    """The highest peaks of each joint.

    Args:
        heat: (K, H, W), contiguous.
        tags: (T, K or 1, H, W), contiguous.
        places: Peaks, as places in the flattened heatmaps.
        max_people: How many to keep for each joint.

    Returns:
        K arrays (N, 3 + T): x, y, score, tags; the highest first, equal ones in reading order.
    """
    num_joints, height, width = heat.shape
    area = height * width
    at = places if tags.shape[1] == num_joints else places % area
    values = torch.cat([heat.view(1, -1)[:, places], tags.flatten(1)[:, at]]).cpu().numpy()
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
    """Move each joint by a quarter pixel towards the higher neighbour (equal ones: left, up), and to pixel centres.

    Args:
        people: (P, K, 3 + T), x and y whole.
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
    """Fill a person's missing joints: where the heatmap less the rounded tag distance is highest, if there is heat.

    Args:
        people: (P, K, 3 + T); x and y as `match` or `adjust` give them.
        heat: (K, H, W).
        tags: (T, K or 1, H, W).

    Returns:
        A changed copy; the tags of filled joints stay zero.
    """
    num_joints, height, width = heat.shape
    found = people[:, :, SCORE] > 0
    num_found = found.sum(axis=1, dtype=np.float32)
    means = torch.from_numpy(people[:, :, TAGS:].sum(axis=1) / num_found[:, None]).to(heat.device)
    places = np.zeros(found.shape, np.int64)
    for joint_number, missing in enumerate(map(np.flatnonzero, ~found.T)):
        if len(missing):
            tag_maps = tags[:, joint_number if tags.shape[1] == num_joints else 0].flatten(1)
            wanted = means[torch.from_numpy(missing)]
            places[missing, joint_number] = _best_places(heat[joint_number].view(-1), tag_maps, wanted)
    person, joint = np.nonzero(~found)
    y, x = np.divmod(places[person, joint], width)
    heights = _read(heat, (joint * height + y) * width + x)
    warm = heights > 0
    filled = people.copy()
    filled[person[warm], joint[warm], :SCORE] = _towards_higher(heat, joint, x, y)[warm]
    filled[person[warm], joint[warm], SCORE] = heights[warm]
    return filled


def _best_places(heat: Tensor, tags: Tensor, means: Tensor) -> IntArray:
    """(HW,) heat, (T, HW) tags of one joint and (M, T) means -> (M,) the first of the best places for each person."""
    if heat.is_cuda:
        return _search(heat, tags, means, _CHUNK_GPU)[0]
    # No place is worth more than its heat. So where the best of the hot places is worth more than the warmest of the
    # others has heat, it is the best of all, and most maps need not be searched.
    hot = torch.from_numpy(np.flatnonzero(heat.numpy() > _HOT))
    if len(hot) == 0:
        return _search(heat, tags, means, _CHUNK_CPU)[0]
    best, values = _search(heat[hot], tags[:, hot], means, _CHUNK_CPU)
    best = hot.numpy()[best]
    unsure = np.flatnonzero(values <= _HOT)
    best[unsure] = _search(heat, tags, means[torch.from_numpy(unsure)], _CHUNK_CPU)[0]
    return best


def _search(heat: Tensor, tags: Tensor, means: Tensor, chunk: int) -> tuple[IntArray, FloatArray]:
    """For each of (M, T) mean tags: the place of the largest heat less rounded tag distance, and that value."""
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
    # Both give the first of equal ones; on CPUs numpy's is four times as fast.
    best = values.argmax(dim=1) if values.is_cuda else torch.from_numpy(values.numpy().argmax(axis=1))
    return best.cpu().numpy(), values.gather(1, best[:, None])[:, 0].cpu().numpy()


def _towards_higher(heat: Tensor, joint: IntArray, x: IntArray, y: IntArray) -> FloatArray:
    """(N,) joints and pixels -> (N, 2): the pixel's centre, moved by a quarter towards the higher neighbour."""
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


def _nonzero(mask: Tensor) -> Tensor:
    # On CPUs numpy's is four times as fast as torch's.
    return mask.nonzero().view(-1) if mask.is_cuda else torch.from_numpy(np.flatnonzero(mask.numpy()))
