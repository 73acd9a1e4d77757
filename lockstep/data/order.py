"""Which samples a step trains on: (seed, epoch, step) -> the indices of every micro-batch.

Everything here is arithmetic on plain integers. The order of an epoch is a keyed permutation that can be asked for any
stretch of positions, so nobody holds a list of all samples: a Feistel network over the next power of two, walked along
its cycle until the value is a sample (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from lockstep.data.groups import Groups
from lockstep.data.keyed import FORWARD, ORDER, IntArray, KeyArray, key, keys, mix_array

NUM_ROUNDS = 8
MIN_BITS = 8  # smaller networks have too few permutations to look random
WINDOW = 4096  # positions permuted at once: numpy's cost for a call then spreads over many samples


class Place(Protocol):
    """Which process of how many: a World, or any object with these two numbers."""

    @property
    def rank(self) -> int:
        """From 0 to size - 1."""

    @property
    def size(self) -> int:
        """How many processes there are."""


def permute(positions: IntArray, num_samples: int, permutation_key: int) -> IntArray:
    """The samples at some positions of a random order of `range(num_samples)`.

    Args:
        positions: (N,) places in the order, each in [0, num_samples).
        num_samples: Length of the order.
        permutation_key: Chooses the order.

    Returns:
        (N,) sample indices. Over all positions, each index comes exactly once.
    """
    bits = max(MIN_BITS, (num_samples - 1).bit_length())
    right_bits = np.uint64(bits // 2)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    round_keys = [np.uint64(key(permutation_key, number)) for number in range(NUM_ROUNDS)]

    def encrypt(values: KeyArray) -> KeyArray:
        left, right = values >> right_bits, values & right_mask
        for number, round_key in enumerate(round_keys):
            if number % 2 == 0:
                left = left ^ (mix_array(right ^ round_key) & left_mask)
            else:
                right = right ^ (mix_array(left ^ round_key) & right_mask)
        return (left << right_bits) | right

    values = encrypt(positions.astype(np.uint64))
    outside = np.flatnonzero(values >= num_samples)
    while len(outside):
        values[outside] = encrypt(values[outside])
        outside = outside[values[outside] >= num_samples]
    return values.astype(np.int64)


def part(start: int, stop: int, num_parts: int, index: int) -> tuple[int, int]:
    """One of the parts of a stretch whose lengths differ by at most one, the longer ones first."""
    size, longer = divmod(stop - start, num_parts)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The samples of one forward pass.

    Attributes:
        step: Number of the step in the run, from 0.
        epoch: From 0.
        index: Place among the step's micro-batches: the leaf of the reduction tree.
        indices: (N,) samples.
        keys: (N,) their random keys in this epoch.
        weight: Share of the step's samples. The weights of a step's micro-batches add up to 1.
        forward_key: Seeds dropout and the like in this forward pass.
    """

    step: int
    epoch: int
    index: int
    indices: IntArray
    keys: KeyArray
    weight: float
    forward_key: int

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer update, as one process sees it.

    Attributes:
        number: In the run, from 0.
        epoch: From 0.
        num_samples: Samples of the step over all processes.
        num_micro_batches: Of the whole step: the leaves of its reduction tree.
        world_size: Processes that share them.
        micro_batches: Those of the process that asked.
    """

    number: int
    epoch: int
    num_samples: int
    num_micro_batches: int
    world_size: int
    micro_batches: tuple[MicroBatch, ...]

    def share(self, rank: int) -> tuple[int, int]:
        """The micro-batches [first, last) that a rank runs."""
        return part(0, self.num_micro_batches, self.world_size, rank)


@dataclass(frozen=True)
class Order:
    """The order in which a run sees its samples.

    Each epoch is a permutation of all samples of its own, cut into steps of `global_batch`; the last step of an epoch
    has what is left. A step is cut evenly into as few micro-batches as hold at most `micro_batch` samples each.

    Samples in groups are cut group by group (`Groups`): a micro-batch then holds samples of one group, and some have
    fewer samples than others.

    Attributes:
        num_samples: Size of the data set.
        global_batch: Samples of one step.
        micro_batch: Most samples of one forward pass.
        seed: Chooses the orders and the keys.
        groups: (N,) number of each sample's group, from 0; None where any samples can share a micro-batch.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    groups: IntArray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.groups is not None and len(self.groups) != self.num_samples:
            raise ValueError(f"{len(self.groups)} samples have a group, and there are {self.num_samples}")

    @cached_property
    def _cut(self) -> Groups | None:
        return None if self.groups is None else Groups(self.groups, self.global_batch, self.micro_batch)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the smaller last one included."""
        if self._cut is not None:
            return self._cut.num_steps
        return -(-self.num_samples // self.global_batch)

    def indices(self, epoch: int, positions: IntArray) -> IntArray:
        """The samples at some positions of an epoch's order."""
        return permute(positions, self.num_samples, key(self.seed, ORDER, epoch))

    def stretch(self, step: int) -> tuple[int, int]:
        """Where a step's samples start and stop in the epoch's order."""
        start = step % self.steps_per_epoch * self.global_batch
        return start, min(start + self.global_batch, self.num_samples)

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """The steps [start, stop) of a run, each with the micro-batches that one process runs.

        Args:
            place: The process: its rank and the number of processes.
            start: Steps already done.
            stop: Steps of the whole run.
        """
        while start < stop:
            # A window never crosses an epoch, as each epoch has its own permutation.
            epoch = start // self.steps_per_epoch
            mine = -(-self.global_batch // place.size)
            last = min(stop, (epoch + 1) * self.steps_per_epoch, start + max(1, WINDOW // mine))
            if self._cut is None:
                yield from self._window(place, epoch, start, last)
            else:
                yield from self._grouped(self._cut, place, epoch, start, last)
            start = last

    def _window(self, place: Place, epoch: int, start: int, stop: int) -> Iterator[Step]:
        plans = []
        for number in range(start, stop):
            first, last = self.stretch(number)
            num_leaves = -(-(last - first) // self.micro_batch)
            leaves = range(*part(0, num_leaves, place.size, place.rank))
            plans.append(
                (number, last - first, num_leaves, [(leaf, part(first, last, num_leaves, leaf)) for leaf in leaves])
            )
        positions = [np.arange(mine[0][1][0], mine[-1][1][1]) for *_, mine in plans if mine]
        indices = self.indices(epoch, np.concatenate(positions)) if positions else np.empty(0, np.int64)
        sample_keys = keys(self.seed, epoch, indices)
        done = 0
        for number, num_samples, num_leaves, mine in plans:
            micro_batches = []
            for leaf, (first, last) in mine:
                rows = slice(done, done + last - first)
                done += last - first
                micro_batches.append(
                    self._micro_batch(number, epoch, leaf, indices[rows], sample_keys[rows], num_samples)
                )
            yield Step(number, epoch, num_samples, num_leaves, place.size, tuple(micro_batches))

    def _grouped(self, cut: Groups, place: Place, epoch: int, start: int, stop: int) -> Iterator[Step]:
        epoch_key = key(self.seed, ORDER, epoch)
        for number in range(start, stop):
            places = cut.places_of_step(number % self.steps_per_epoch)
            leaves = [cut.leaf(leaf) for leaf in permute(places, cut.num_leaves, key(epoch_key, 0)).tolist()]
            num_samples = sum(last - first for _, first, last in leaves)
            micro_batches = []
            for leaf in range(*part(0, len(leaves), place.size, place.rank)):
                group, first, last = leaves[leaf]
                positions = permute(np.arange(first, last), cut.size(group), key(epoch_key, 1, group))
                indices = cut.samples(group, positions)
                sample_keys = keys(self.seed, epoch, indices)
                micro_batches.append(self._micro_batch(number, epoch, leaf, indices, sample_keys, num_samples))
            yield Step(number, epoch, num_samples, len(leaves), place.size, tuple(micro_batches))

    def _micro_batch(
        self, number: int, epoch: int, leaf: int, indices: IntArray, sample_keys: KeyArray, num_samples: int
    ) -> MicroBatch:
        return MicroBatch(
            step=number,
            epoch=epoch,
            index=leaf,
            indices=indices,
            keys=sample_keys,
            weight=len(indices) / num_samples,
            forward_key=key(self.seed, FORWARD, number, leaf),
        )
