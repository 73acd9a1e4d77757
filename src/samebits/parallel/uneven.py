"""Steps whose micro-batches are divided by the speed of the ranks: a slow rank gets fewer.

    micro-batch      0  1  2  3  4  5  6  7  8  9 10 11
    even division    0  0  0  0  0  0  1  1  1  1  1  1      rank 1 takes twice as long: 12 units of time
    by speed         0  0  0  0  0  0  0  0  1  1  1  1      8 units

Each rank still has neighboring micro-batches. The sum over a step follows the tree, wherever its leaves are
computed, so the division changes no bit in exact mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from samebits.data.micro_batches import Alone, even_shares
from samebits.data.order import Order, Place, Step

# Seconds per micro-batch on each rank.
Times = tuple[float, ...]


@lru_cache(maxsize=64)
def divide(num_micro_batches: int, times: Times) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches [first, last) of each rank, so that the slowest one is done as early as possible.

    Each rank has at least one, since the time of a rank without any is unknown. Too few are divided as in other worlds.

    Args:
        num_micro_batches: Micro-batches of a step.
        times: Seconds per micro-batch on each rank, all above 0.
    """
    num_ranks = len(times)
    if num_micro_batches < num_ranks:
        return even_shares(num_micro_batches, num_ranks)
    counts = [1] * num_ranks
    for _ in range(num_micro_batches - num_ranks):
        # The rank that would be done first with one more; the lowest of several, so that all ranks agree.
        counts[min(range(num_ranks), key=lambda rank: ((counts[rank] + 1) * times[rank], rank))] += 1
    return tuple(pairwise(accumulate(counts, initial=0)))


def duration(shares: Sequence[tuple[int, int]], times: Times) -> float:
    """Return how long a step's micro-batches take on the rank that is done last.

    Args:
        shares: The micro-batches [first, last) of each rank.
        times: Seconds per micro-batch on each rank.
    """
    return max((last - first) * each for (first, last), each in zip(shares, times, strict=True))


@dataclass(frozen=True, eq=False)
class UnevenStep(Step):
    """A step whose micro-batches are not divided evenly."""

    shares: tuple[tuple[int, int], ...] = ()  #: The micro-batches [first, last) of each rank.

    def shares_of_ranks(self) -> tuple[tuple[int, int], ...]:
        """See `Step.shares_of_ranks`."""
        return self.shares


def uneven_steps(order: Order, place: Place, times: Times, *, start: int, stop: int) -> Iterator[UnevenStep]:
    """Iterate over the steps [start, stop) of a run, each with the micro-batches of one rank.

    Args:
        order: Plans the steps.
        place: The rank and the world size.
        times: Seconds per micro-batch on each rank.
        start: First step.
        stop: The step after the last one.
    """
    for step in order.steps(Alone(), start=start, stop=stop):
        shares = divide(step.num_micro_batches, times)
        yield UnevenStep(
            number=step.number,
            epoch=step.epoch,
            num_samples=step.num_samples,
            num_micro_batches=step.num_micro_batches,
            world_size=place.size,
            micro_batches=step.micro_batches[slice(*shares[place.rank])],
            shares=shares,
        )
