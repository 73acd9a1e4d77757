"""A step that another world has begun: some of its micro-batches are summed already, the others are dealt again."""

from __future__ import annotations

from dataclasses import dataclass

from samebits.data.order import MicroBatch, Order, Place, Step

Nodes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Leaf:
    """In a world of one micro-batch a rank, the rank that has a certain micro-batch."""

    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class ResumedStep(Step):
    """A step whose micro-batches do not follow from the world."""

    held: tuple[Nodes, ...] = ()  #: For each rank, the nodes of the tree that it has summed.
    leaves: tuple[tuple[int, ...], ...] = ()  #: For each rank, the micro-batches that it still computes.


def resume_step(
    order: Order, number: int, place: Place, held: tuple[Nodes, ...], leaves: tuple[tuple[int, ...], ...]
) -> ResumedStep:
    """Return a step with this rank's missing micro-batches.

    Args:
        order: Plans the steps.
        number: The step.
        place: The rank and the world size.
        held: See `ResumedStep`.
        leaves: See `ResumedStep`.
    """
    step = next(order.steps(place, start=number, stop=number + 1))
    return ResumedStep(
        number=number,
        epoch=step.epoch,
        num_samples=step.num_samples,
        num_micro_batches=step.num_micro_batches,
        world_size=place.size,
        micro_batches=tuple(_micro_batch(order, step, leaf) for leaf in leaves[place.rank]),
        held=held,
        leaves=leaves,
    )


def _micro_batch(order: Order, step: Step, leaf: int) -> MicroBatch:
    place = _Leaf(leaf, step.num_micro_batches)
    (found,) = next(order.steps(place, start=step.number, stop=step.number + 1)).micro_batches
    return found
