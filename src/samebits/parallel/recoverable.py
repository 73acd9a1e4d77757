"""A reducer whose partial sums survive the loss of other ranks (`cluster.recovery=in_step`).

    reduce()   exchange of bucket 0: wait | add ...            until the first addition, this rank's own sums are whole
                                     ^      ^
                a rank is lost here -+      +- or here: the sums are overwritten, and their micro-batches run again

Where a message cannot be sent during a backward pass, the micro-batch is finished first: its sums are then whole in all
buckets. `reduce` raises the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.cluster.connecting import is_lost_peer
from samebits.cluster.world import World
from samebits.data.division import part
from samebits.data.order import Step
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.reduce import Reducer
from samebits.parallel.tree import Node

# What the ranks of a new world agree on after a loss: the step to continue, the weights, and who computes what.
#
# A rank is lost at any moment of a step, so the others may stand at different points of it:
#
#     rank 0   applied step 6 | leaves 0 1 of step 7 ......... |      held (0,2)      keeps its sum
#     rank 1   applied step 6 | leaves 2 3 of step 7, exchange |      held ()         its sums were overwritten
#     rank 2   applied step 5 | waits for a message of rank 3  |      older weights   receives those of rank 0
#     rank 3   lost                                            |
#     agreement: 7 steps applied, source rank 0, receivers (2,), leaves 2 to 7 are missing: 2 3 | 4 5 | 6 7
#
# A step counts as applied as soon as one remaining rank has applied it: the others then receive its weights. Otherwise
# none has, and the step is finished from the sums that are left. This module computes with integers only.


@dataclass(frozen=True)
class RankReport:
    """Where a rank stands when it enters a new world."""

    num_steps: int  #: Steps applied to its weights; -1: it is new, and has no weights.
    evaluated_step: int = 0  #: `num_steps` at its last complete validation.
    nodes: tuple[Node, ...] = ()  #: The partial sums that it holds of the step after those.


@dataclass(frozen=True)
class Agreement:
    """Where a world continues; equal on all ranks, since all compute it from the same reports."""

    num_steps: int  #: Steps applied, on every rank once the receivers have the weights.
    evaluated_step: (
        int  #: The last validation that counts. Ranks that have completed a later one repeat it.
    )
    source: int  #: The rank that sends its weights.
    receivers: tuple[int, ...]  #: The ranks that receive them.
    #: For each rank, the partial sums that it keeps of the next step.
    held: tuple[tuple[Node, ...], ...]

    def deal(self, num_leaves: int) -> tuple[tuple[int, ...], ...]:
        """Return, for each rank, the micro-batches of the next step that it has to compute."""
        done = {leaf for nodes in self.held for first, last in nodes for leaf in range(first, last)}
        missing = [leaf for leaf in range(num_leaves) if leaf not in done]
        size = len(self.held)
        return tuple(
            tuple(missing[slice(*part(0, len(missing), size, rank))]) for rank in range(size)
        )


def agree(reports: Sequence[RankReport]) -> Agreement:
    """Return where a world continues. Reports are by rank.

    Raises:
        ValueError: No rank has weights, or two ranks hold the sum of one micro-batch.
    """
    num_steps = max(report.num_steps for report in reports)
    if num_steps < 0:
        raise ValueError("no rank has weights")
    receivers = tuple(rank for rank, report in enumerate(reports) if report.num_steps < num_steps)
    held = tuple(report.nodes if report.num_steps == num_steps else () for report in reports)
    leaves = [leaf for nodes in held for first, last in nodes for leaf in range(first, last)]
    if len(leaves) != len(set(leaves)):
        raise ValueError(f"two ranks hold the sum of one micro-batch: {held}")
    return Agreement(
        num_steps=num_steps,
        # A validation counts only once all ranks have completed it (ADR 48).
        evaluated_step=min(
            report.evaluated_step for report in reports if report.num_steps == num_steps
        ),
        # The first of those ranks, so that all ranks choose the same one.
        source=next(rank for rank, report in enumerate(reports) if report.num_steps == num_steps),
        receivers=receivers,
        held=held,
    )


class RecoverableReducer(Reducer):
    """A `Reducer` that can continue in another world, also within a step.

    Within a step not with synchronized batch norm, whose micro-batches wait for the lost rank.
    """

    _lost: RuntimeError | None = None
    _is_open = False  # a step has begun and is not reduced

    def begin(self, step: Step, loss_scale: float = 1.0) -> None:
        """Start or continue a step; see `Reducer.begin`."""
        self._lost = None
        super().begin(step, loss_scale)
        self._is_open = True

    def reduce(self, flag: float = 0.0) -> None:
        """Finish the sums over all ranks; see `Reducer.reduce`. Raises RuntimeError if another rank is lost."""
        if self._lost is not None:
            raise self._lost
        super().reduce(flag)
        self._is_open = False

    def suspend(self) -> tuple[Node, ...]:
        """Reset the buffers to the start of an open step, and return the partial sums that are whole.

        It may be called again before the step continues.
        """
        if not self._is_open:
            return ()
        self._now = None
        self._buffers.reset()
        self._sum.end_threads()
        # Within a backward pass, a micro-batch has ended in some buckets only: then no sum is whole in all of them.
        nodes = {tuple(node for node, _ in bucket.nodes) for bucket in self._sum.buckets}
        has_added = any(
            not isinstance(each, TreeAllReduce) or each.has_added for each in self._sum.exchanges
        )
        return () if has_added or len(nodes) != 1 else nodes.pop()

    def drop_step(self) -> None:
        """Drop the open step, since newer weights have replaced those that it was computed with."""
        self._is_open = False

    def move_to(self, world: World) -> None:
        """Continue in another world."""
        self._world = self._sum.world = world
        if self._layer_sums is not None:
            self._layer_sums.move_to(world)

    def _end(self, number: int) -> None:
        if self._lost is not None or self._present.division.held:
            # Micro-batches of a resumed step are in any order: its buckets are sent in `reduce`.
            self._sum.end_leaf(number, may_send=False)
            return
        try:
            super()._end(number)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            self._lost = error
