"""How the micro-batches of a step are divided among the ranks. In exact mode it changes no bit.

    micro-batch     0  1  2  3  4  5  6
    evenly          0  0  0  1  1  2  2     neighbors, so that a rank's partial sums are few
    by machine      0  0  1  1  2  2  2     ranks 0 1 are on one machine, 2 on another: each has a complete subtree
    by speed        0  0  0  0  1  2  2     `cluster.load_balancing`: rank 1 is slow
    in turn         0  1  2  0  1  2  0     exact mode, sharded: what runs at the same time is neighboring
    dealt           0  .  .  1  0  2  .     after a loss within the step: the sums of 1, 2 and 6 are held

Padded, each rank has as many as rank 0, for ranks whose passes are collective calls: it repeats the first one with
weight 0. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from samebits.data.micro_batches import even_shares, part

# Seconds per micro-batch on each rank.
Times = tuple[float, ...]
# The micro-batches of each rank, in the order in which it computes them.
Leaves = tuple[Sequence[int], ...]


@dataclass(frozen=True)
class Division:
    """How micro-batches are divided: evenly, unless a field is set."""

    times: Times = ()  #: Divide by speed.
    is_in_turn: bool = False  #: Deal them out in turn.
    dealt: Leaves = ()  #: The micro-batches that each rank still computes, after a loss within the step.
    held: tuple[tuple[tuple[int, int], ...], ...] = ()  #: For each rank, the nodes of the tree that it has summed.
    is_padded: bool = False  #: Let each rank have as many as rank 0.

    def leaves(self, num_micro_batches: int, size: int, machines: tuple[int, ...] = ()) -> Leaves:
        """Return the indices of each rank's micro-batches, without padding. `machines`: each rank's, if several."""
        return self.dealt or _leaves(self.times, self.is_in_turn, num_micro_batches, size, machines)

    def passes(self, leaves: Leaves, rank: int) -> list[int]:
        """Return the indices of a rank's micro-batches, with those of its padding: repeats of the first one."""
        most = max(map(len, leaves)) if self.is_padded else 0
        return [*leaves[rank], *[0] * (most - len(leaves[rank]))]


EVEN, PADDED, IN_TURN = Division(), Division(is_padded=True), Division(is_in_turn=True, is_padded=True)


@lru_cache(64)  # the steps of a run differ in two sizes at most
def _leaves(times: Times, is_in_turn: bool, num_micro_batches: int, size: int, machines: tuple[int, ...]) -> Leaves:
    if is_in_turn:
        return tuple(range(rank, num_micro_batches, size) for rank in range(size))
    if machines and not times and num_micro_batches >= size:
        return _by_machine(num_micro_batches, machines)
    shares = divide(num_micro_batches, times) if times else even_shares(num_micro_batches, size)
    return tuple(range(*share) for share in shares)


def _by_machine(num_micro_batches: int, machines: tuple[int, ...]) -> Leaves:
    """Divide evenly, but choose which ranks have one more so that machines have few nodes of the tree.

    Machines with more ranks come first: with 1, 1 and 4 ranks, the four have the complete subtree (0, 4).
    """
    least, size = num_micro_batches // len(machines), len(machines)
    most = -(-num_micro_batches // size)
    groups = [[rank for rank in range(size) if machines[rank] == each] for each in dict.fromkeys(machines)]
    leaves, start, num_later = [range(0)] * size, 0, size
    for group in sorted(groups, key=len, reverse=True):
        num_later -= len(group)
        ends = range(
            max(start + least * len(group), num_micro_batches - most * num_later),
            min(start + most * len(group), num_micro_batches - least * num_later) + 1,
        )
        end = max(ends, key=lambda end: end & -end)  # a multiple of the largest power of two: the end of a subtree
        for place, rank in enumerate(group):
            leaves[rank] = range(*part(start, end, len(group), place))
        start = end
    return tuple(leaves)


@lru_cache(maxsize=64)
def divide(num_micro_batches: int, times: Times) -> tuple[tuple[int, int], ...]:
    """Return each rank's micro-batches [first, last), so that the slowest by `times` is done as early as possible.

    Each rank has at least one, since the time of a rank without any is unknown. Too few are divided as in other worlds.
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
    """Return how long shares [first, last) of a step take on the rank that is done last, by seconds per micro-batch."""
    return max((last - first) * each for (first, last), each in zip(shares, times, strict=True))
