"""Steps in which every process makes the same number of forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.data.order import Order, Place, Step


@dataclass(frozen=True)
class _First:
    """The process that has a micro-batch in every step."""

    size: int
    rank: int = 0


class PaddedOrder(Order):
    """An `Order` for processes that can't pass through the model without each other.

    A process with fewer micro-batches than the first one goes through the step's first micro-batch once more, with
    weight 0.
    """

    def steps(self, place: Place, *, start: int = 0, stop: int) -> Iterator[Step]:
        """As `Order.steps`, each step with as many micro-batches as that of rank 0."""
        mine = super().steps(place, start=start, stop=stop)
        for step, first in zip(mine, super().steps(_First(place.size), start=start, stop=stop), strict=True):
            num_missing = len(first.micro_batches) - len(step.micro_batches)
            again = replace(first.micro_batches[0], weight=0.0)
            yield replace(step, micro_batches=step.micro_batches + (again,) * num_missing)
