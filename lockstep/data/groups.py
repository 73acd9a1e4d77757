"""Samples in groups that can't share a forward pass, such as lines of text of several widths.

Each group is cut into micro-batches of its own; an epoch's micro-batches of all groups come in random order, and a step
takes the next few. So a step mixes groups, and a micro-batch never does.
"""

from __future__ import annotations

import numpy as np

from lockstep.data.keyed import IntArray


class Groups:
    """How an epoch's samples are cut.

    Args:
        groups: (N,) number of each sample's group, from 0.
        global_batch: Most samples of one step.
        micro_batch: Most samples of one micro-batch.

    Attributes:
        num_leaves: Micro-batches of an epoch.
        leaves_per_step: Micro-batches of a step; the last step of an epoch has what is left.
    """

    def __init__(self, groups: IntArray, global_batch: int, micro_batch: int) -> None:
        # As an ungrouped step is: into as few micro-batches as can be, all of nearly one size.
        self.leaves_per_step = -(-global_batch // micro_batch)
        most = global_batch // self.leaves_per_step
        self._members = np.argsort(groups, kind="stable")
        counts = np.bincount(groups)
        counts = counts[counts > 0]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._leaf_counts = -(-counts // most)
        self._leaf_ends = np.cumsum(self._leaf_counts)
        self.num_leaves = int(self._leaf_ends[-1])

    @property
    def num_steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.num_leaves // self.leaves_per_step)

    def places_of_step(self, step: int) -> IntArray:
        """Where the micro-batches of a step of the epoch stand in the epoch's order of micro-batches."""
        start = step * self.leaves_per_step
        return np.arange(start, min(start + self.leaves_per_step, self.num_leaves))

    def leaf(self, number: int) -> tuple[int, int, int]:
        """A micro-batch by its number: its group (empty ones don't count), and the stretch of the group that it has.

        The stretch is of positions in the group's own random order.
        """
        group = int(np.searchsorted(self._leaf_ends, number, side="right"))
        num_leaves = int(self._leaf_counts[group])
        place = number - (int(self._leaf_ends[group]) - num_leaves)
        size, longer = divmod(self.size(group), num_leaves)
        first = place * size + min(place, longer)
        return group, first, first + size + (place < longer)

    def size(self, group: int) -> int:
        """Samples of a group."""
        return int(self._ends[group] - self._starts[group])

    def samples(self, group: int, positions: IntArray) -> IntArray:
        """The indices of a group's samples, by their positions in the group."""
        samples: IntArray = self._members[self._starts[group] + positions]
        return samples


class Batches:
    """The batches of an evaluation, in order: each sample once, groups apart.

    Args:
        num_samples: Of the data set.
        batch_size: Most samples of one batch.
        groups: (N,) number of each sample's group, from 0; None where all can share a batch.
    """

    def __init__(self, num_samples: int, batch_size: int, groups: IntArray | None = None) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self._cuts: list[IntArray] | None = None
        if groups is not None:
            members = np.argsort(groups, kind="stable")
            parts = np.split(members, np.flatnonzero(np.diff(groups[members])) + 1)
            self._cuts = [
                part[start : start + batch_size] for part in parts for start in range(0, len(part), batch_size)
            ]

    def __len__(self) -> int:
        return -(-self._num_samples // self._batch_size) if self._cuts is None else len(self._cuts)

    def __getitem__(self, place: int) -> IntArray:
        if self._cuts is not None:
            return self._cuts[place]
        start = place * self._batch_size
        return np.arange(start, min(start + self._batch_size, self._num_samples))


def groups_of(samples: object) -> IntArray | None:
    """The groups of a data set's samples: its `groups`, (N,) int64 from 0, if it has any."""
    groups: IntArray | None = getattr(samples, "groups", None)
    return groups
