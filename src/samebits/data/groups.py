"""Grouped batching: samples that cannot share a forward pass, such as text lines of several widths.

Each group is split into micro-batches of its own. An epoch has the micro-batches of all groups in random order, and a
step takes the next few. So a step mixes groups, and a micro-batch never does. (Elsewhere: bucketing, as in
torchtext's BucketIterator.)
"""

import numpy as np

from samebits.data.keyed import IntArray
from samebits.data.micro_batches import num_micro_batches, part


class Groups:
    """The micro-batches of an epoch of grouped samples. `groups`: (N,) group of each sample, from 0."""

    def __init__(self, groups: IntArray, global_batch: int, micro_batch: int) -> None:
        # As in a step without groups: as few micro-batches as possible, all of nearly equal size.
        #: Micro-batches of a step; the last step of an epoch has the rest.
        self.leaves_per_step = num_micro_batches(global_batch, micro_batch)
        most = global_batch // self.leaves_per_step
        # Stable: NumPy's other methods may order equal values differently on another processor.
        self._members = np.argsort(groups, kind="stable")
        counts = np.bincount(groups)
        counts = counts[counts > 0]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._leaf_counts = -(-counts // most)
        self._leaf_ends = np.cumsum(self._leaf_counts)
        self.num_leaves = int(self._leaf_ends[-1])  #: Micro-batches of an epoch.

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_leaves // self.leaves_per_step)

    def positions_of_step(self, step: int) -> IntArray:
        """Return the positions of a step's micro-batches in the epoch's order of micro-batches, (leaves_per_step,)."""
        start = step * self.leaves_per_step
        return np.arange(start, min(start + self.leaves_per_step, self.num_leaves))

    def leaf(self, number: int) -> tuple[int, int, int]:
        """Return (group, first, last) of a micro-batch: positions [first, last) of the group's own random order.

        Groups are numbered without empty ones.
        """
        group = int(np.searchsorted(self._leaf_ends, number, side="right"))
        num_leaves = int(self._leaf_counts[group])
        index = number - (int(self._leaf_ends[group]) - num_leaves)
        return group, *part(0, self.size(group), num_leaves, index)

    def size(self, group: int) -> int:
        """Return the number of samples of a group."""
        return int(self._ends[group] - self._starts[group])

    def samples(self, group: int, positions: IntArray) -> IntArray:
        """Return the indices of samples, (N,), by their positions in the group, (N,)."""
        samples: IntArray = self._members[self._starts[group] + positions]
        return samples


class Batches:
    """The batches of an evaluation in order: each sample once, without mixing groups, (N,) numbers from 0 or None."""

    def __init__(self, num_samples: int, batch_size: int, groups: IntArray | None = None) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self._cuts: list[IntArray] | None = None
        if groups is not None:
            # Stable, as in `Groups`: the order has to be equal on every machine.
            members = np.argsort(groups, kind="stable")
            parts = np.split(members, np.flatnonzero(np.diff(groups[members])) + 1)
            self._cuts = [
                each[start : start + batch_size] for each in parts for start in range(0, len(each), batch_size)
            ]

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size) if self._cuts is None else len(self._cuts)

    def __getitem__(self, index: int) -> IntArray:
        if self._cuts is not None:
            return self._cuts[index]
        start = index * self._batch_size
        return np.arange(start, min(start + self._batch_size, self._num_samples))
