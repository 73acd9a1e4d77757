"""Steps in which every rank runs the same number of forward passes, for sharded models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from samebits.data.micro_batches import Alone, num_micro_batches
from samebits.data.order import Order, Place, Step


@dataclass(frozen=True)
class _First:
    """Rank 0, which has a micro-batch in every step."""

    size: int
    rank: int = 0


class PaddedOrder(Order):
    """An `Order` for ranks whose forward and backward passes are collective calls.

    A rank with fewer micro-batches than rank 0 repeats the step's first micro-batch with weight 0.
    """

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """Iterate over steps; see `Order.steps`. Each has as many micro-batches as rank 0's."""
        mine = super().steps(place, start=start, stop=stop)
        for step, first in zip(mine, super().steps(_First(place.size), start=start, stop=stop), strict=True):
            num_missing = len(first.micro_batches) - len(step.micro_batches)
            again = replace(first.micro_batches[0], weight=0.0)
            yield replace(step, micro_batches=step.micro_batches + (again,) * num_missing)


class DealtOrder(Order):
    """An `Order` that deals a step's micro-batches out in turn, for a sharded model in exact mode.

    The micro-batches that run at the same time are then neighbors in the reduction tree, and enter it together. Ranks
    with fewer than rank 0 repeat the step's first one with weight 0. Seven micro-batches on three ranks:

        rank 0    0  3  6
        rank 1    1  4  (0)
        rank 2    2  5  (0)
    """

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """Iterate over steps; see `Order.steps`. Each has as many micro-batches as rank 0's."""
        for step in super().steps(Alone(), start=start, stop=stop):
            mine = step.micro_batches[place.rank :: place.size]
            num_missing = num_micro_batches(step.num_micro_batches, place.size) - len(mine)
            again = replace(step.micro_batches[0], weight=0.0)
            yield replace(step, world_size=place.size, micro_batches=mine + (again,) * num_missing)
