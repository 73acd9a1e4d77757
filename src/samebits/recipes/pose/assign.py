"""Groups peaks into people by their tags.

Associative embedding (Newell, Huang, Deng 2017) as in HigherHRNet's implementation: joint by joint, the peaks of one
joint are assigned to the people so far, with the smallest sum of tag distances.

Legend: P people, K joints, N peaks of one joint, T tags of a peak (2 with flip testing), M people so far.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

FloatArray = npt.NDArray[np.floating]
X, Y, SCORE, TAGS = 0, 1, 2, 3
# _TIE is the bonus of a pair below the threshold: less than the difference of two scores, more than rounding errors.
_FAR, _TIE = 1e10, 1e-9


def match(
    peaks: Sequence[FloatArray],
    order: Sequence[int],
    *,
    max_people: int,
    tag_threshold: float,
) -> npt.NDArray[np.float32]:
    """Group peaks into people.

    Args:
        peaks: For each of K joints (N, 3 + T): x, y, score, tags; sorted by descending score.
        order: The joints in the order in which they are processed.
        max_people: Each peak is compared with the first `max_people` people. The result can have more people.
        tag_threshold: A peak with at least this distance from the mean tags of every person starts a new person.

    Returns:
        (P, K, 3 + T) float32, in the order in which the people were started; missing joints are all zeros.
    """
    num_joints, num_columns = len(peaks), peaks[0].shape[1] if len(peaks) else TAGS + 1
    capacity = sum(map(len, peaks))
    people = np.zeros((capacity, num_joints, num_columns), np.float32)
    sums, counts = np.zeros((capacity, num_columns - TAGS), np.float32), np.zeros(capacity, np.float32)
    # As in the reference, a person is identified by the value of the first tag: an equal one is the same person.
    numbers: dict[float, int] = {}
    for joint in order:
        found = peaks[joint]
        if len(found) == 0:
            continue
        rows, owners = range(len(found)), [-1] * len(found)
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
                sums[owner], counts[owner] = found[row, TAGS:], 1
            people[owner, joint] = found[row]
    return people[: len(numbers)]


def tag_distances(found: FloatArray, means: FloatArray) -> FloatArray:
    """Compute (N, M) distances between the tags of (N, 3 + T) peaks and (M, T) mean tags."""
    difference = found[:, None, TAGS:].astype(np.float64) - means[None]
    return np.asarray(np.sqrt((difference * difference).sum(axis=2)))


def assignment_cost(distances: FloatArray, found: FloatArray) -> FloatArray:
    """Compute the (N, M) cost of assigning a peak to a person: higher peaks choose first where distances tie.

    Args:
        distances: (N, M) tag distances.
        found: (N, 3 + T) peaks.
    """
    cost = np.rint(distances) * 100 - found[:, SCORE : SCORE + 1].astype(np.float64)
    # A diverged network may return NaN tags. Their peaks are then near to no person.
    return np.asarray(np.nan_to_num(cost, nan=_FAR, posinf=_FAR))


def assign(cost: FloatArray, is_near: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
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
