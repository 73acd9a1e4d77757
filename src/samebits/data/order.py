"""The order of samples (a sampler): (seed, epoch, step) -> the sample indices of every micro-batch.

Everything is integer arithmetic. The order of an epoch is a keyed permutation that is evaluated for any range of
positions, so no process stores a list of all samples: a Feistel network over the next power of two, applied again
until the value is a sample ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

From the epoch's order to ranks, with global_batch=8, micro_batch=2 and two ranks:

    position in the epoch    0  1  2  3  4  5  6  7 | 8  9 10 11 12 13 14 15 | ...
    step                     0                      | 1                      | ...
    micro-batch (leaf)       0     1     2     3    | 0     1     2     3    |
    rank                     0     0     1     1    | 0     0     1     1    |
    sample = permute(position), its random numbers = key(seed, epoch, sample)

Only the row "rank" depends on the world: another world runs the same micro-batches on other ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from samebits.data.division import EVEN, Division, Groups, Leaves, part
from samebits.data.keyed import FORWARD, ORDER, IntArray, KeyArray, key, keys, mix_array

NUM_ROUNDS = 8
MIN_BITS = 8  # smaller networks have too few permutations to look random
WINDOW = (
    4096  # positions permuted in one call: a numpy call costs microseconds, whatever its length
)


class Place(Protocol):
    """A rank of a world: a `World`, or any object with these attributes."""

    @property
    def rank(self) -> int:
        """Rank, from 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of processes."""

    @property
    def machines(self) -> tuple[int, ...]:
        """For each rank the number of its machine; empty: all are on one."""


def permute(positions: IntArray, num_samples: int, permutation_key: int) -> IntArray:
    """Return the samples at (N,) positions, in [0, num_samples), of a random permutation of `range(num_samples)`.

    Returns:
        (N,) sample indices. Over all positions, each index occurs exactly once.
    """
    bits = max(MIN_BITS, (num_samples - 1).bit_length())
    right_bits = np.uint64(bits // 2)
    left_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint64((1 << (bits // 2)) - 1)
    round_keys = [np.uint64(key(permutation_key, number)) for number in range(NUM_ROUNDS)]

    # An unbalanced Feistel network: each round changes one half by a hash of the other, so it is a bijection for any
    # hash. Both halves keep their number of bits, also where the total is odd.
    def encrypt(values: KeyArray) -> KeyArray:
        left = values >> right_bits
        right = values & right_mask
        for number, round_key in enumerate(round_keys):
            if number % 2 == 0:
                left = left ^ (mix_array(right ^ round_key) & left_mask)
            else:
                right = right ^ (mix_array(left ^ round_key) & right_mask)
        return (left << right_bits) | right

    # Of a small domain all values are encrypted at once, since a call costs microseconds, whatever its length.
    walk = (
        encrypt(np.arange(1 << bits, dtype=np.uint64)).__getitem__
        if 1 << bits <= WINDOW
        else encrypt
    )
    values = walk(positions.astype(np.uint64))
    # The domain is less than twice num_samples (above MIN_BITS), so few values walk far. Each walk ends, since a
    # cycle of the bijection that starts at a sample returns to it.
    outside = np.flatnonzero(values >= num_samples)
    while len(outside):
        values[outside] = walk(values[outside])
        outside = outside[values[outside] >= num_samples]
    return values.astype(np.int64)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The samples of one forward pass.

    Attributes:
        step: Step of the run, from 0.
        epoch: Epoch, from 0.
        index: Index in the step: the leaf of the reduction tree.
        indices: (N,) samples.
        keys: (N,) random keys of the samples in this epoch.
        weight: Fraction of the step's samples. The weights of a step's micro-batches add up to 1.
        forward_key: Seed of the forward pass, for dropout.
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
    """One optimizer update, with the micro-batches of one rank.

    Attributes:
        number: Step of the run, from 0.
        epoch: Epoch, from 0.
        num_samples: Samples of the step over all ranks.
        num_micro_batches: Micro-batches of the step over all ranks: the leaves of its reduction tree.
        leaves: For each rank, the indices of its micro-batches, in the order in which it computes them.
        micro_batches: The micro-batches of this rank.
        division: How they are divided.
    """

    number: int
    epoch: int
    num_samples: int
    num_micro_batches: int
    leaves: Leaves
    micro_batches: tuple[MicroBatch, ...]
    division: Division = EVEN

    @property
    def has_all(self) -> bool:
        """Whether all micro-batches of the step are this rank's, so that it can log the ids of all samples."""
        return len(self.micro_batches) == self.num_micro_batches


@dataclass(frozen=True)
class Order:
    """The order in which a run trains on its samples: what a sampler is in PyTorch.

    Each epoch has its own permutation of all samples, split into steps of `global_batch`; the last step of an epoch
    has the rest. A step is split evenly into as few micro-batches of at most `micro_batch` samples as possible.

    Grouped samples are split group by group (`Groups`): a micro-batch then has samples of a single group, and the sizes
    of micro-batches differ.

    Attributes:
        num_samples: Size of the dataset.
        global_batch: Samples of one step.
        micro_batch: Largest number of samples of one forward pass.
        seed: Selects the permutations and the keys.
        groups: (N,) group of each sample, from 0; None if any samples can share a micro-batch.
        is_shuffled: Permute the samples of each epoch; otherwise their order is that of the dataset.
        drop_last: Leave out a last step with fewer samples.
        division: How the micro-batches of a step are divided among the ranks.
    """

    num_samples: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    # Not compared: the == of an array is no single answer.
    groups: IntArray | None = field(default=None, compare=False, repr=False)
    is_shuffled: bool = True
    drop_last: bool = False
    division: Division = EVEN

    def __post_init__(self) -> None:
        for name in ("num_samples", "global_batch", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.groups is not None and len(self.groups) != self.num_samples:
            raise ValueError(
                f"groups has {len(self.groups)} entries for {self.num_samples} samples"
            )

    @cached_property
    def _cut(self) -> Groups | None:
        return (
            None
            if self.groups is None
            else Groups(self.groups, self.global_batch, self.micro_batch)
        )

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, including a smaller last one unless it is left out."""
        if self._cut is not None:
            return self._cut.num_steps
        return self.num_samples // self.global_batch + (
            not self.drop_last and self.num_samples % self.global_batch > 0
        )

    def indices(self, epoch: int, positions: IntArray) -> IntArray:
        """Return the samples, (N,), at some positions, (N,), of an epoch's order."""
        return (
            permute(positions, self.num_samples, key(self.seed, ORDER, epoch))
            if self.is_shuffled
            else positions
        )

    def positions(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of a step's samples in the epoch's order."""
        start = step % self.steps_per_epoch * self.global_batch
        return start, min(start + self.global_batch, self.num_samples)

    def steps(
        self, place: Place, *, start: int = 0, stop: int, division: Division | None = None
    ) -> Iterator[Step]:
        """Iterate over the steps [start, stop) of a run, each with the micro-batches of one rank.

        Args:
            place: The rank and the world size.
            start: First step: the number of steps already done.
            stop: The step after the last one.
            division: How micro-batches are divided among the ranks; None: by the attribute of the order.
        """
        division = self.division if division is None else division
        while start < stop:
            # A window ends with its epoch, since each epoch has its own permutation. Its length has no effect on the
            # steps, only on the number of numpy calls.
            epoch = start // self.steps_per_epoch
            mine = -(-self.global_batch // place.size)
            last = min(stop, (epoch + 1) * self.steps_per_epoch, start + max(1, WINDOW // mine))
            plan = self._window if self._cut is None else self._grouped
            yield from plan(place, division, epoch, range(start, last))
            start = last

    def _window(
        self, place: Place, division: Division, epoch: int, numbers: range
    ) -> Iterator[Step]:
        # All positions of the window are permuted by one call, then split into steps and micro-batches again.
        plans = []
        for number in numbers:
            first, last = self.positions(number)
            num_leaves = -(-(last - first) // self.micro_batch)
            leaves = division.leaves(num_leaves, place.size, place.machines)
            mine = [
                (leaf, part(first, last, num_leaves, leaf))
                for leaf in division.passes(leaves, place.rank, number)
            ]
            plans.append((number, last - first, num_leaves, leaves, mine))
        positions = [np.arange(*bounds) for *_, mine in plans for _, bounds in mine]
        indices = (
            self.indices(epoch, np.concatenate(positions)) if positions else np.empty(0, np.int64)
        )
        sample_keys = keys(self.seed, epoch, indices)
        done = 0
        for number, num_samples, num_leaves, leaves, mine in plans:
            own = []
            for leaf, (first, last) in mine:
                rows = slice(done, done + last - first)
                done += last - first
                own.append((leaf, indices[rows], sample_keys[rows]))
            num_counted = len(leaves[place.rank])
            micro_batches = self._micro_batches(number, epoch, own, num_counted, num_samples)
            yield Step(number, epoch, num_samples, num_leaves, leaves, micro_batches, division)

    def _grouped(
        self, place: Place, division: Division, epoch: int, numbers: range
    ) -> Iterator[Step]:
        # Two permutations: of the epoch's micro-batches over all groups, and of the samples within each group.
        epoch_key = key(self.seed, ORDER, epoch)
        cut = self._cut
        assert cut is not None
        for number in numbers:
            start = number % self.steps_per_epoch * cut.leaves_per_step
            positions = np.arange(start, min(start + cut.leaves_per_step, len(cut.leaves)))
            cuts = [
                cut.leaves[leaf]
                for leaf in permute(positions, len(cut.leaves), key(epoch_key, 0)).tolist()
            ]
            num_samples = sum(last - first for _, first, last in cuts)
            leaves = division.leaves(len(cuts), place.size, place.machines)
            own = []
            for leaf in division.passes(leaves, place.rank, number):
                group, first, last = cuts[leaf]
                members = cut.members[group]
                positions = permute(np.arange(first, last), len(members), key(epoch_key, 1, group))
                own.append((leaf, members[positions], keys(self.seed, epoch, members[positions])))
            num_counted = len(leaves[place.rank])
            micro_batches = self._micro_batches(number, epoch, own, num_counted, num_samples)
            yield Step(number, epoch, num_samples, len(cuts), leaves, micro_batches, division)

    def _micro_batches(
        self,
        number: int,
        epoch: int,
        own: list[tuple[int, IntArray, KeyArray]],
        num_counted: int,
        num_samples: int,
    ) -> tuple[MicroBatch, ...]:
        return tuple(
            MicroBatch(
                step=number,
                epoch=epoch,
                index=leaf,
                indices=indices,
                keys=sample_keys,
                # Of the step's samples: the sum over micro-batches is then the gradient of the mean over the step.
                # What is repeated must not count twice.
                weight=len(indices) / num_samples if place < num_counted else 0.0,
                # By step and micro-batch, never by rank: dropout draws the same numbers in every world.
                forward_key=key(self.seed, FORWARD, number, leaf),
            )
            for place, (leaf, indices, sample_keys) in enumerate(own)
        )
