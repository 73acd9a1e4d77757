"""The micro-batches of a step: their number, their groups, and how they are divided among the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np

from samebits.data.keyed import IntArray

# Number of micro-batches, and those of each rank. Imports no torch, so commands can use it before torch is loaded.


def num_micro_batches(num_samples: int, micro_batch: int) -> int:
    """Return the fewest micro-batches of at most `micro_batch` samples that hold `num_samples`."""
    return -(-num_samples // micro_batch)


def smallest_micro_batch(num_samples: int, global_batch: int, micro_batch: int) -> int:
    """Return the number of samples in the smallest micro-batch of an epoch, whose last step has the rest."""
    steps = {min(global_batch, num_samples), num_samples % global_batch or global_batch}
    return min(step // num_micro_batches(step, micro_batch) for step in steps)


def two_or_more(num_samples: int, global_batch: int, micro_batch: int) -> str:
    """Return the nearest settings without a micro-batch of one sample, as a fix."""
    if num_samples < 2:
        return "Add training samples."
    # With micro_batch=3 or more, only a step of one sample has such a micro-batch.
    for wide in count(global_batch):
        for least in range(micro_batch, min(wide, max(micro_batch, 3)) + 1):
            if smallest_micro_batch(num_samples, wide, least) > 1:
                chosen = (
                    f"global_batch={wide}" * (wide != global_batch),
                    f"micro_batch={least}" * (least != micro_batch),
                )
                return f"Set {' '.join(filter(None, chosen))}."
    raise AssertionError


def part(start: int, stop: int, num_parts: int, index: int) -> tuple[int, int]:
    """Split [start, stop) into parts whose lengths differ by at most one, longer first; return (first, stop) of one."""
    size, longer = divmod(stop - start, num_parts)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


@lru_cache(
    16
)  # the steps of a run differ in two sizes at most, and each asks for the shares of all ranks
def even_shares(num_micro_batches: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches [first, last) of each rank."""
    return tuple(part(0, num_micro_batches, world_size, rank) for rank in range(world_size))


class Alone:
    """The place of the only rank of a world of one, which has all micro-batches of a step."""

    rank = 0
    size = 1
    machines = (0,)


# Grouped batching: samples that cannot share a forward pass, such as text lines of several widths.
#
# Each group is split into micro-batches of its own. An epoch has the micro-batches of all groups in random order, and a
# step takes the next few. So a step mixes groups, and a micro-batch never does. (Elsewhere: bucketing, as in
# torchtext's BucketIterator.)


def members_of(groups: IntArray) -> list[IntArray]:
    """Return the samples of each group, ascending, without empty groups. `groups`: (N,) groups, from 0."""
    # Stable: NumPy's other methods may order equal values differently on another processor.
    members = np.argsort(groups, kind="stable")
    return np.split(members, np.flatnonzero(np.diff(groups[members])) + 1)


class Groups:
    """The micro-batches of an epoch of grouped samples. `groups`: (N,) group of each sample, from 0."""

    def __init__(self, groups: IntArray, global_batch: int, micro_batch: int) -> None:
        # As in a step without groups: as few micro-batches as possible, all of nearly equal size.
        #: Micro-batches of a step; the last step of an epoch has the rest.
        self.leaves_per_step = num_micro_batches(global_batch, micro_batch)
        most = global_batch // self.leaves_per_step
        self.members = members_of(groups)  #: (N,) samples of each group.
        #: (group, first, last) of each micro-batch of an epoch: positions [first, last) of the group's random order.
        self.leaves = list[tuple[int, int, int]]()
        for group, members in enumerate(self.members):
            num_leaves = num_micro_batches(len(members), most)
            self.leaves += [
                (group, *part(0, len(members), num_leaves, index)) for index in range(num_leaves)
            ]

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return num_micro_batches(len(self.leaves), self.leaves_per_step)


class Batches:
    """The batches of an evaluation in order: each sample once, without mixing groups, (N,) numbers from 0 or None."""

    def __init__(self, num_samples: int, batch_size: int, groups: IntArray | None = None) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._cuts: list[IntArray] | None = None
        if groups is not None:
            self._cuts = [
                each[start : start + batch_size]
                for each in members_of(groups)
                for start in range(0, len(each), batch_size)
            ]

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size) if self._cuts is None else len(self._cuts)

    def __getitem__(self, index: int) -> IntArray:
        if self._cuts is not None:
            return self._cuts[index]
        start = index * self._batch_size
        return np.arange(start, min(start + self._batch_size, self._num_samples))


# How the micro-batches of a step are divided among the ranks. It changes no bit.
#
#     micro-batch     0  1  2  3  4  5  6
#     evenly          0  0  0  1  1  2  2     neighbors, so that a rank's partial sums are few
#     by machine      0  0  1  1  2  2  2     ranks 0 1 are on one machine, 2 on another: each has a complete subtree
#     dealt           0  .  .  1  0  2  .     after a loss within the step: the sums of 1, 2 and 6 are held
#
# Padded, each rank has as many as rank 0, for ranks whose passes are collective calls: it repeats one of another rank
# with weight 0. Imports no torch.


# The micro-batches of each rank, in the order in which it computes them.
Leaves = tuple[Sequence[int], ...]


@dataclass(frozen=True)
class Division:
    """How micro-batches are divided: evenly, unless a field is set."""

    dealt: Leaves = ()  #: The micro-batches that each rank still computes, after a loss within the step.
    #: For each rank, the nodes of the tree that it has summed.
    held: tuple[tuple[tuple[int, int], ...], ...] = ()
    is_padded: bool = False  #: Let each rank have as many as rank 0.

    def leaves(self, num_micro_batches: int, size: int, machines: tuple[int, ...] = ()) -> Leaves:
        """Return the indices of each rank's micro-batches, without padding. `machines`: each rank's, if several."""
        return self.dealt or _leaves(num_micro_batches, size, machines)

    def repeated(self, leaves: Leaves, step: int) -> int:
        """Return the micro-batch that pads a step: the first one of each rank that has most, in turn."""
        most = max(map(len, leaves))
        firsts = [each[0] for each in leaves if len(each) == most]
        return firsts[step % len(firsts)]

    def passes(self, leaves: Leaves, rank: int, step: int) -> list[int]:
        """Return the indices of a rank's micro-batches, with those of its padding: repeats of one."""
        most = max(map(len, leaves)) if self.is_padded else 0
        return [*leaves[rank], *[self.repeated(leaves, step)] * (most - len(leaves[rank]))]


EVEN = Division()
PADDED = Division(is_padded=True)


@lru_cache(64)  # the steps of a run differ in two sizes at most
def _leaves(num_micro_batches: int, size: int, machines: tuple[int, ...]) -> Leaves:
    if machines and num_micro_batches >= size:
        return _by_machine(num_micro_batches, machines)
    return tuple(range(*share) for share in even_shares(num_micro_batches, size))


def _by_machine(num_micro_batches: int, machines: tuple[int, ...]) -> Leaves:
    """Divide evenly, but choose which ranks have one more so that machines have few nodes of the tree.

    Machines with more ranks come first: with 1, 1 and 4 ranks, the four have the complete subtree (0, 4).
    """
    least = num_micro_batches // len(machines)
    size = len(machines)
    most = -(-num_micro_batches // size)
    groups = [
        [rank for rank in range(size) if machines[rank] == each] for each in dict.fromkeys(machines)
    ]
    leaves = [range(0)] * size
    start = 0
    num_later = size
    for group in sorted(groups, key=len, reverse=True):
        num_later -= len(group)
        ends = range(
            max(start + least * len(group), num_micro_batches - most * num_later),
            min(start + most * len(group), num_micro_batches - least * num_later) + 1,
        )
        # a multiple of the largest power of two: the end of a subtree
        end = max(ends, key=lambda end: end & -end)
        for place, rank in enumerate(group):
            leaves[rank] = range(*part(start, end, len(group), place))
        start = end
    return tuple(leaves)
