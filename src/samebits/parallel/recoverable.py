"""A reducer whose partial sums survive the loss of other ranks (`cluster.recovery=in_step`).

    reduce()   exchange of bucket 0: wait | add ...            until the first addition, this rank's own sums are whole
                                     ^      ^
                a rank is lost here -+      +- or here: the sums are overwritten, and their micro-batches run again

Where a message cannot be sent during a backward pass, the micro-batch is finished first: its sums are then whole in all
buckets. `reduce` raises the error.
"""

from samebits.cluster.peer_errors import is_lost_peer
from samebits.cluster.world import World
from samebits.data.order import Step
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.reduce import Reducer
from samebits.parallel.tree import Node


class RecoverableReducer(Reducer):
    """A `Reducer` that can continue in another world, also within a step. Only for exact mode.

    Within a step not with synchronized batch norm, whose micro-batches wait for the lost rank.
    """

    _lost: RuntimeError | None = None
    _is_open = False  # a step has begun and is not reduced

    @property
    def num_bytes(self) -> int:
        """Size of the buckets in a message."""
        return sum(bucket.length * bucket.dtype.itemsize for bucket in self._sum.buckets)

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
        has_added = any(not isinstance(each, TreeAllReduce) or each.has_added for each in self._sum.exchanges)
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
