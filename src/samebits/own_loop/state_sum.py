"""Sums the buffers' changes over a step's micro-batches and all ranks, such as the statistics of batch norm."""

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Step
from samebits.frames import user_level
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.part import bucket_tag
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.reduce import JOINED_BYTES, nodes_of
from samebits.parallel.running import RunningBuffers


class BufferSum:
    """The buffers of some modules; see `RunningBuffers`.

    Each backward pass of a body has a sum of its own, of what the buffers have changed by since the one before. It is
    sent with the gradients of that pass, so it costs no wait of its own, and no message if both are small. What a body
    changes after its last backward pass is dropped, in any world.
    """

    def __init__(self, modules: Sequence[nn.Module], world: World) -> None:
        self._world = world
        self._buffers = RunningBuffers(nn.ModuleList(modules))
        for module in modules:
            module.register_state_dict_post_hook(_give_own_memory)
        self._length = len(self._buffers)
        self._buckets: list[Bucket] = []  # one for each backward pass
        # of those passes that this step has; None: see `join`
        self._exchanges: list[TreeAllReduce | None] = []
        self._joined: set[int] = set()
        self._num_used = 0
        self._done: list[MicroBatch] = []
        self._step: Step | None = None

    def begin_step(self, step: Step) -> None:
        """Start a step."""
        self._step = step
        self._num_used = 0
        self._exchanges = []
        self._done = []
        self._joined = set()
        self._buffers.start_step()

    def take(self, turn: int, micro_batch: MicroBatch) -> None:
        """Take the change by the forward passes before a backward pass; none of a micro-batch with weight 0."""
        if not self._length:
            return
        self._enter(self._bucket(turn), micro_batch, self._buffers.change())

    def end(self, micro_batch: MicroBatch) -> None:
        """End a micro-batch: backward passes that it did not have count as zero, and the buffers are reset."""
        if not self._length:
            return
        if self._buffers.has_changed():
            _warn_of_changes()
        self._fill(micro_batch)
        self._done.append(micro_batch)
        self._buffers.reset()

    def join(self, turn: int, micro_batch: MicroBatch) -> Bucket | None:
        """Return the changes before a backward pass, for the caller to sum over all ranks before `finish_reduce`.

        Args:
            micro_batch: The last one of this rank, which counts as zero if it did not have that pass.

        Returns:
            The bucket; None if there is nothing to send.
        """
        if not self._length or self._world.size == 1 or 4 * self._length > JOINED_BYTES:
            return None
        bucket = self._bucket(turn)
        # It has not entered this micro-batch yet: a pass may have changed no buffer.
        if bucket.next_leaf <= micro_batch.index:
            self._enter(bucket, micro_batch, None)
        self._joined.add(turn)
        return bucket

    def start_reduce(self, num_turns: int) -> None:
        """Send this rank's changes. Called in the last micro-batch of a step."""
        assert self._step is not None
        while len(self._exchanges) < min(num_turns, self._num_used):
            number = len(self._exchanges)
            if number in self._joined:
                self._exchanges.append(None)
                continue
            exchange = TreeAllReduce(
                self._buckets[number], self._world, nodes_of(self._step), bucket_tag(number)
            )
            exchange.start()
            self._exchanges.append(exchange)

    def finish_reduce(self, micro_batch: MicroBatch) -> None:
        """Apply the weighted means of all changes, on all ranks.

        The last micro-batch counts as zero in backward passes that it did not have.
        """
        self._fill(micro_batch)
        self.start_reduce(self._num_used)
        for bucket, exchange in zip(self._buckets, self._exchanges, strict=False):
            if exchange is not None:
                while not exchange.advance():
                    pass
            assert bucket.result is not None
            self._buffers.apply(bucket.result.tail[: self._length])
        self._buffers.start_step()  # for `drop_changes`

    def drop_changes(self) -> None:
        """Drop what forward passes after the last backward pass or the update of a body have changed."""
        if self._length and self._buffers.has_changed():
            _warn_of_changes()
            self._buffers.reset()

    def _bucket(self, turn: int) -> Bucket:
        """Return the bucket of a backward pass, which may be the step's first one to have it."""
        assert self._step is not None
        while turn >= self._num_used:
            if self._num_used == len(self._buckets):
                self._buckets.append(Bucket([], self._length, self._world.size, self._world.device))
            bucket = self._buckets[self._num_used]
            self._num_used += 1
            bucket.start_step(self._step.leaves[self._world.rank])
            for micro_batch in self._done:
                self._enter(bucket, micro_batch, None)
        return self._buckets[turn]

    def _fill(self, micro_batch: MicroBatch) -> None:
        for bucket in self._buckets[: self._num_used]:
            if bucket.next_leaf <= micro_batch.index:
                self._enter(bucket, micro_batch, None)

    def _enter(self, bucket: Bucket, micro_batch: MicroBatch, change: Tensor | None) -> None:
        if micro_batch.weight == 0.0:
            return
        assert self._step is not None
        count = self._step.num_micro_batches
        leaf = bucket.start_leaf(micro_batch.index, count)
        leaf.put_tail(
            torch.zeros_like(leaf.flat.tail) if change is None else change.mul_(micro_batch.weight)
        )
        bucket.end_leaf(leaf, count)


def _warn_of_changes() -> None:
    warnings.warn(
        "Forward passes after the last backward pass of a loop's body change no buffers, such as running "
        "statistics. Call model.eval() before a pass that is only measured.",
        stacklevel=user_level(sys._getframe()),
    )


def _give_own_memory(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Copy the buffers in a state_dict: they are views of one tensor, and safetensors refuses shared memory."""
    for name, buffer in module.named_buffers():
        if prefix + name in state:
            state[prefix + name] = buffer.detach().clone()
