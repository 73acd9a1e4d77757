"""Steps in which some micro-batches are computed on a second rank, whose result has to have the same bits (ADR 37).

All ranks repeat equally many in the same steps, so that none waits for another. With watch.recheck=1/50, three ranks
and two micro-batches a rank, that is one step in 25:

    rank             0        1        2
    step 7           0  1     2  3     4  5
    step 8           0  1     2  3     4  5
      repeats           4        1        2         chosen by (seed, step): a micro-batch of the rank `shift` before
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from samebits.data.keyed import RECHECK, key
from samebits.data.micro_batches import part
from samebits.data.order import MicroBatch, Order, Place, Recheck, Step


@dataclass(frozen=True)
class _Leaf:
    """In a world of one micro-batch a rank, the rank that has a certain micro-batch."""

    rank: int
    size: int


@dataclass(frozen=True)
class RecheckedOrder(Order):
    """An `Order` with rechecks. Micro-batches are those of `Order`."""

    recheck: float = 0.0  #: Fraction of the micro-batches that a second rank repeats.

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """Iterate over steps; see `Order.steps`. Some have rechecks."""
        for step in super().steps(place, start=start, stop=stop):
            rechecks = self._choose(step.number, step.num_micro_batches, place.size)
            if not rechecks:
                yield step
                continue
            mine = [self.repeat(step, each.index) for each in rechecks if each.rank == place.rank]
            yield replace(step, rechecks=rechecks, repeats=tuple(mine))

    def repeat(self, step: Step, index: int) -> MicroBatch:
        """Return any micro-batch of a step, to be computed once more."""
        leaf = _Leaf(index, step.num_micro_batches)
        (found,) = next(super().steps(leaf, start=step.number, stop=step.number + 1)).micro_batches
        return replace(found, is_repeat=True)

    def _choose(self, number: int, num_micro_batches: int, size: int) -> tuple[Recheck, ...]:
        if size < 2:
            return ()
        # The largest share decides how long the step takes, so one more micro-batch costs this fraction of the step.
        expected = self.recheck * -(-num_micro_batches // size)
        # From seed and step, so that all ranks choose the same ones without a message.
        count = int(expected) + (key(self.seed, RECHECK, number) / 2.0**64 < expected % 1)
        if not count:
            return ()
        # Random, not in turn: a fault that comes at regular intervals could otherwise always be missed.
        shift = 1 + key(self.seed, RECHECK, number, 0) % (size - 1)
        rechecks = []
        for owner in range(size):
            first, last = part(0, num_micro_batches, size, owner)
            begin = key(self.seed, RECHECK, number, 1, owner)
            rechecks += [
                Recheck(first + (begin + turn) % (last - first), owner, (owner + shift) % size)
                for turn in range(min(count, last - first))
            ]
        return tuple(rechecks)
