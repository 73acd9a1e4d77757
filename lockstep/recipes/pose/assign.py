"""Which joint is whose: peaks joined to people by their tags.

Associative embedding (Newell, Huang, Deng 2017) as HigherHRNet's implementation groups it: joint after joint, the peaks
of one joint are assigned to the people found so far such that the sum of tag distances is smallest.

Legend: P people, K joints, N peaks of one joint, T tags of a peak (2 with the mirrored image's), M people looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

FloatArray = npt.NDArray[np.floating]
X, Y, SCORE, TAGS = 0, 1, 2, 3
# What a pair that lasts is worth: less than any two scores differ by, more than sums of costs are rounded by.
_FAR, _TIE = 1e10, 1e-9


def match(
    peaks: Sequence[FloatArray],
    order: Sequence[int],
    *,
    max_people: int,
    tag_threshold: float,
    use_score: bool = True,
    ignore_too_much: bool = False,
) -> npt.NDArray[np.float32]:
    """Join peaks to people.

    Args:
        peaks: For each of K joints (N, 3 + T): x, y, score, tags; best score first.
        order: The joints in the order in which they are taken.
        max_people: A peak is compared with so many people at most, those found first. It is no limit on how many are
            found.
        tag_threshold: A peak whose tags lie so far from a person's mean tags, or farther, begins a person of its own.
        use_score: Round distances to whole numbers and let the better score decide among equal ones.
        ignore_too_much: Once `max_people` people are found, take no further joints.

    Returns:
        (P, K, 3 + T) float32 in the order in which the people were found; a missing joint is all zeros.
    """
    num_joints, num_columns = len(peaks), peaks[0].shape[1] if len(peaks) else TAGS + 1
    capacity = sum(map(len, peaks))
    people = np.zeros((capacity, num_joints, num_columns), np.float32)
    sums, counts = np.zeros((capacity, num_columns - TAGS), np.float32), np.zeros(capacity, np.float32)
    # As in the reference, a person is known by the value of the first tag: an equal one is the same person.
    numbers: dict[float, int] = {}
    for joint in order:
        found = peaks[joint]
        if len(found) == 0:
            continue
        rows, owners = range(len(found)), [-1] * len(found)
        if numbers:
            known = min(len(numbers), max_people)
            if ignore_too_much and known == max_people:
                continue
            means = sums[:known] / counts[:known, None]
            distances = tag_distances(found, means)
            is_near = distances < tag_threshold
            for row, column in assign(assignment_cost(distances, found, use_score=use_score), is_near):
                if is_near[row, column]:
                    owners[row] = column
        for row, owner in zip(rows, owners, strict=True):
            if owner >= 0:
                sums[owner] += found[row, TAGS:]
                counts[owner] += 1
            else:
                owner = numbers.setdefault(float(found[row, TAGS]), len(numbers))
                sums[owner], counts[owner] = found[row, TAGS:], 1
            people[owner, joint] = found[row]
    return people[: len(numbers)]


def tag_distances(found: FloatArray, means: FloatArray) -> FloatArray:
    """(N, 3 + T) peaks and (M, T) mean tags -> (N, M) distances."""
    difference = found[:, None, TAGS:].astype(np.float64) - means[None]
    return np.asarray(np.sqrt((difference * difference).sum(axis=2)))


def assignment_cost(distances: FloatArray, found: FloatArray, *, use_score: bool) -> FloatArray:
    """(N, M): what it costs to give a peak to a person."""
    cost = distances
    if use_score:
        cost = np.rint(distances) * 100 - found[:, SCORE : SCORE + 1].astype(np.float64)
    # A network that has gone wrong may give tags that are no numbers; its peaks then belong to nobody.
    return np.nan_to_num(cost, nan=_FAR, posinf=_FAR)


def assign(cost: FloatArray, is_near: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Pairs (peak, person) of smallest total cost; with more peaks than people some peaks stay alone.

    Rounded distances tie often: with people's tags on a line, to hand every peak on to the next person costs no more
    than to leave all in place and send one far away, but begins many people instead of one. The reference's choice
    hangs on the version of its solver. Of the cheapest, ours is one with the most pairs that last.

    Args:
        cost: (N, M).
        is_near: (N, M) whether a pair is near enough to last.
    """
    rows, columns = linear_sum_assignment(cost - _TIE * is_near)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))
