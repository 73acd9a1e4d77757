"""Sums the gradients of one backward pass over a step's micro-batches and all ranks, inside a loop of the user.

The loop calls `loss.backward()` itself, so gradients arrive unweighted, by hooks. Each is multiplied by the fraction of
the step's samples that its micro-batch has, and enters the tree of `parallel/tree.py`:

    begin_step          before the step's first micro-batch
      begin_leaf        before a micro-batch's backward pass
        take x N        a hook for each parameter; buckets of the last micro-batch are sent while backward continues
      end_leaf
    reduce              after the last micro-batch's backward pass: every rank has the same sums
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.parallel.bucket import Bucket, Leaf, group
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.exchange.tags import bucket_tag
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.reduce import BUCKET_BYTES
from samebits.parallel.tree import Node, rank_nodes

JOINED_BYTES = 1 << 20  # of a bucket: copying a larger one costs as much as a message


@dataclass(frozen=True)
class StepNodes:
    """The tree of one step."""

    step: Step  #: The step, with this rank's micro-batches.
    nodes: list[list[Node]]  #: For each rank, the nodes that it sums.

    @classmethod
    def of(cls, step: Step, world: World) -> StepNodes:
        """Return the tree of a step in a world."""
        return cls(step, rank_nodes(step.leaves, step.num_micro_batches))


class JoinedAllReduce:
    """The all-reduce of several buckets in one step, with the methods of a `TreeAllReduce`.

    For gradients and what the buffers have changed by. Posting a message and its receive takes about half a
    millisecond, whatever its size: a twentieth of a small network's step. An all-reduce adds value by value, so it does
    not matter for the bits which bucket a value is in.

    Args:
        parts: The buckets, which have the same nodes. `finish` sets their `result`.
        memory: A bucket that is at least as long as all of them, for copies. Its values behind them are zero.
        world: The ranks.
        nodes: For each rank, its nodes.
        tag: Of the first of the joined buckets, from `bucket_tag`.
    """

    def __init__(
        self, parts: Sequence[Bucket], memory: Bucket, world: World, nodes: list[list[Node]], tag: int
    ) -> None:
        self._parts, self._memory = parts, memory
        self._length = sum(part.length for part in parts)
        memory.start_step(())
        memory.nodes = [(node, memory.flat()) for node, _ in parts[0].nodes]
        self._all_reduce = make_all_reduce(memory, world, nodes, tag)

    def start(self) -> None:
        """Send copies of this rank's nodes."""
        for (_, flat), *own in zip(self._memory.nodes, *(part.nodes for part in self._parts), strict=True):
            # Copies: the buckets have memory of their own, and one message needs it in one piece.
            torch.cat([each.values for _, each in own], out=flat.values[: self._length])
        self._all_reduce.start()

    def middle(self) -> None:
        """See `TreeAllReduce.middle`."""
        self._all_reduce.middle()

    def finish(self) -> None:
        """Wait for the sums, and copy them into the buckets."""
        self._all_reduce.finish()
        assert self._memory.result is not None
        sums = self._memory.result.values[: self._length].split([part.length for part in self._parts])
        for part, values in zip(self._parts, sums, strict=True):
            result = part.nodes[0][1] if part.nodes else part.flat()
            result.values.copy_(values)
            part.settle(result)


class GradientSum:
    """The sum of the gradients of some parameters in one of the loop's backward passes.

    Args:
        parameters: Float32 and dense, in the order of their registration, on one device.
        world: The ranks.
        number: Number of this sum; different for all sums of a process.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], world: World, number: int) -> None:
        self._world = world
        self._number = number
        # Backward reaches the last parameters first, so buckets in that order can be sent while it continues.
        groups = group(parameters[::-1], BUCKET_BYTES)
        self._num_parameters = len(parameters)
        tails = [0] * (len(groups) - 1) + [len(parameters)]  # the last bucket also has which parameters were used
        self._buckets = [
            Bucket(part, tail, world.size, True, parameters[0].device) for part, tail in zip(groups, tails, strict=True)
        ]
        self._place: dict[Tensor, tuple[int, int]] = {
            parameter: (number, index)
            for number, bucket in enumerate(self._buckets)
            for index, parameter in enumerate(bucket.parameters)
        }
        self._nodes: StepNodes | None = None
        self._leaves: list[Leaf] = []
        self._weight = 1.0
        self._exchanges: list[TreeAllReduce | JoinedAllReduce] = []
        self._joined: Bucket | None = None
        self.norm = torch.zeros(())  #: 2-norm of the summed gradient, (), after `reduce`.

    @property
    def next_leaf(self) -> int:
        """Index of the next micro-batch to enter the tree."""
        return self._buckets[-1].next_leaf

    @property
    def is_open(self) -> bool:
        """Whether a micro-batch's gradients are being taken."""
        return bool(self._leaves)

    @property
    def can_join(self) -> bool:
        """Whether another small bucket can be sent in one message with the last gradients."""
        return 4 * self._buckets[-1].length <= JOINED_BYTES

    def begin_step(self, nodes: StepNodes) -> None:
        """Start a step, and free the gradients of the step before."""
        self._nodes, self._leaves, self._exchanges = nodes, [], []
        for bucket in self._buckets:
            bucket.start_step(nodes.step.leaves[self._world.rank])

    def begin_leaf(self, micro_batch: MicroBatch) -> None:
        """Start taking the gradients of a micro-batch."""
        assert self._nodes is not None, "begin_step comes first"
        self._weight = micro_batch.weight
        count = self._nodes.step.num_micro_batches
        self._leaves = [bucket.start_leaf(micro_batch.index, count) for bucket in self._buckets]

    def take(self, parameter: Tensor, *, is_last: bool) -> None:
        """Add a parameter's gradient of this backward pass to the micro-batch's leaf.

        Args:
            parameter: The parameter, of any shape.
            is_last: Whether buckets that are complete can be sent, because all ranks run their last micro-batch.

        Raises:
            RuntimeError: The backward pass has reached the parameter twice.
        """
        number, index = self._place[parameter]
        leaf = self._leaves[number]
        self._buckets[number].give(leaf, index, self._weight)
        # The last bucket waits for its tail; the others can be sent while backward continues.
        if not leaf.missing and number + 1 < len(self._buckets):
            self._end(number, is_last=is_last)

    def end_leaf(self) -> None:
        """End the micro-batch: gradients that it does not have count as zero."""
        used = torch.ones(self._num_parameters)
        position = 0
        for bucket, leaf in zip(self._buckets, self._leaves, strict=True):
            if leaf.missing:
                used[[position + index for index in leaf.missing]] = 0.0
            position += len(bucket.parameters)
        self._leaves[-1].put_tail(used.to(self._buckets[0].device))
        for number, leaf in enumerate(self._leaves):
            if not leaf.is_done:
                self._end(number)
        self._leaves = []

    def skip_leaf(self, micro_batch: MicroBatch) -> None:
        """Enter a micro-batch that has no gradient."""
        self.begin_leaf(micro_batch)
        self.end_leaf()

    def start_reduce(self, joined: Bucket | None = None) -> None:
        """Send this rank's sums. Other work may follow before `reduce`.

        Args:
            joined: A bucket with the same nodes, to be summed in the messages of the last gradients.
        """
        while len(self._exchanges) < len(self._buckets):
            self._start_next(joined)

    def reduce(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Finish the sums over all ranks.

        Returns:
            Each parameter with its gradient, both of the same shape `(...)`: the mean over the step's samples. None for
            a parameter that no micro-batch of the step used. The gradients are valid until the next `begin_step`.
        """
        self.start_reduce()
        for exchange in self._exchanges:  # the second round of a bucket is sent while the next one is added up
            exchange.middle()
        for exchange in self._exchanges:
            exchange.finish()
        results = [bucket.result for bucket in self._buckets if bucket.result is not None]
        norms = [
            torch.linalg.vector_norm(result.values[: bucket.tail_start])
            for bucket, result in zip(self._buckets, results, strict=True)
        ]
        self.norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
        # One transfer for all numbers: on a GPU each read waits for the device.
        used = iter(results[-1].tail[: self._num_parameters].tolist())
        return [
            (parameter, view if next(used) > 0 else None)
            for bucket, result in zip(self._buckets, results, strict=True)
            for parameter, view in zip(bucket.parameters, result.views, strict=True)
        ]

    def _end(self, number: int, *, is_last: bool = False) -> None:
        assert self._nodes is not None
        bucket, leaf = self._buckets[number], self._leaves[number]
        bucket.add_given(leaf, self._weight)
        bucket.end_leaf(leaf, self._nodes.step.num_micro_batches)
        if not is_last:
            return
        while len(self._exchanges) + 1 < len(self._buckets):
            # In the order of the buckets on all ranks, whatever the order of their gradients: NCCL matches by order.
            if not self._buckets[len(self._exchanges)].is_complete:
                return
            self._start_next()

    def _start_next(self, joined: Bucket | None = None) -> None:
        assert self._nodes is not None
        number = len(self._exchanges)
        bucket, tag = self._buckets[number], bucket_tag(number, self._number)
        exchange: TreeAllReduce | JoinedAllReduce
        if joined is None or number + 1 < len(self._buckets):
            exchange = make_all_reduce(bucket, self._world, self._nodes.nodes, tag)
        else:
            if self._joined is None:
                self._joined = Bucket([], bucket.length + joined.length, self._world.size, True, bucket.device)
            exchange = JoinedAllReduce([bucket, joined], self._joined, self._world, self._nodes.nodes, tag)
        exchange.start()
        self._exchanges.append(exchange)
