"""Sums the gradients of one backward pass over a step's micro-batches and all ranks, inside a loop of the user.

The loop calls `loss.backward()` itself, so gradients arrive unweighted, by hooks. Each is multiplied by the fraction of
the step's samples that its micro-batch has, and enters the tree of `parallel/tree.py`:

    start_step          before the step's first micro-batch
      begin_leaf        before a micro-batch's backward pass
        take x N        a hook for each parameter
      close_leaf
    reduce              after the last micro-batch's backward pass
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import MicroBatch
from samebits.parallel.bucket import Bucket
from samebits.parallel.reduce import JOINED_BYTES, BucketSum, bucket_bytes, group


class GradientSum(BucketSum):
    """The sum of the gradients of some parameters in one of the loop's backward passes.

    Args:
        parameters: Float32 and dense, in the order of their registration, on one device.
        number: Number of this sum; different for all sums of a process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, number: int) -> None:
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        groups = group(parameters[::-1], bucket_bytes(parameters, world))
        tails = [0] * (len(groups) - 1) + [
            len(parameters)
        ]  # the last bucket also has which parameters were used
        device = parameters[0].device
        buckets = [
            Bucket(part, tail, world.size, device) for part, tail in zip(groups, tails, strict=True)
        ]
        super().__init__(buckets, world, number)
        self._place: dict[Tensor, tuple[int, int]] = {
            parameter: (number, index)
            for number, bucket in enumerate(buckets)
            for index, parameter in enumerate(bucket.parameters)
        }
        self._weight = 1.0
        self.norm = torch.zeros(())  #: 2-norm of the summed gradient, (), after `reduce`.

    @property
    def next_leaf(self) -> int:
        """Index of the next micro-batch to enter the tree."""
        return self.buckets[-1].next_leaf

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch's gradients are being taken."""
        return bool(self.leaves)

    @property
    def can_join(self) -> bool:
        """Whether another small bucket can be sent in one message with the last gradients."""
        return 4 * self.buckets[-1].length <= JOINED_BYTES

    def begin_leaf(self, micro_batch: MicroBatch) -> None:
        """Start taking the gradients of a micro-batch."""
        self._weight = micro_batch.weight
        self.start_leaves(micro_batch.index)

    def take(self, parameter: Tensor, *, is_last: bool) -> None:
        """Add a parameter's gradient of this backward pass to the micro-batch's leaf.

        Of any shape. `is_last`: complete buckets can be sent, because all ranks run their last micro-batch.

        Raises:
            RuntimeError: The backward pass has reached the parameter twice.
        """
        number, index = self._place[parameter]
        leaf = self.leaves[number]
        self.buckets[number].give(leaf, index, self._weight)
        # The last bucket waits for its tail; the others can be sent while backward continues.
        if not leaf.missing and number + 1 < len(self.leaves):
            self._end(number, may_send=is_last)

    def close_leaf(self) -> None:
        """End the micro-batch: gradients that it does not have count as zero."""
        self.leaves[-1].put_tail(self.used())
        for number, leaf in enumerate(self.leaves):
            if not leaf.is_done:
                self._end(number, may_send=False)
        self.leaves = []

    def skip_leaf(self, micro_batch: MicroBatch) -> None:
        """Enter a micro-batch that has no gradient."""
        self.begin_leaf(micro_batch)
        self.close_leaf()

    def reduce(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Finish the sums over all ranks.

        Returns:
            Each parameter with its gradient, both of the same shape `(...)`: the mean over the step's samples. None for
            a parameter that no micro-batch of the step used. The gradients are valid until the next `start_step`.
        """
        results = self.finish()
        norms = [
            torch.linalg.vector_norm(result.values[: bucket.tail_start])
            for bucket, result in zip(self.buckets, results, strict=True)
        ]
        self.norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
        # One transfer for all numbers: on a GPU each read waits for the device.
        used = results[-1].tail[: self._num_parameters].tolist()
        return list(self.gradients(results, used))

    def _end(self, number: int, *, may_send: bool) -> None:
        leaf = self.leaves[number]
        self.buckets[number].add_given(leaf, self._weight)
        self.end_leaf(number, may_send=may_send)
