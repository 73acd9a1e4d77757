"""Sums the buffers' changes over a step's micro-batches and all ranks, such as the statistics of batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.cluster.world import World
from lockstep.data.order import MicroBatch
from lockstep.own_loop.gradients import StepNodes
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.running import RunningBuffers
from lockstep.parallel.tree_all_reduce import TreeAllReduce


class BufferSum:
    """The buffers of some modules; see `RunningBuffers`.

    Args:
        modules: On the world's device.
        world: The ranks.
    """

    def __init__(self, modules: Sequence[nn.Module], world: World) -> None:
        self._world = world
        self._buffers = RunningBuffers(nn.ModuleList(modules))
        for module in modules:
            module.register_state_dict_post_hook(_give_own_memory)
        length = len(self._buffers)
        self._bucket = Bucket([], length, world.size, True, world.device) if length else None
        self._length = length
        self._nodes: StepNodes | None = None
        self._exchange: TreeAllReduce | None = None

    def begin_step(self, nodes: StepNodes) -> None:
        """Start a step."""
        self._nodes = nodes
        self._buffers.start_step()
        if self._bucket is not None:
            self._bucket.start_step(nodes.share(self._world.rank)[0])

    def reset(self) -> None:
        """Drop the changes since the last `end`, for a micro-batch that is not the first of its step."""
        self._buffers.reset()

    def end(self, micro_batch: MicroBatch) -> None:
        """Take the change by a micro-batch's forward passes, and reset the buffers.

        Args:
            micro_batch: The micro-batch; the change of one with weight 0 is dropped.
        """
        assert self._nodes is not None
        change = self._buffers.take_change()
        if self._bucket is None or micro_batch.weight == 0.0:
            return
        count = self._nodes.step.num_micro_batches
        leaf = self._bucket.start_leaf(micro_batch.index, count)
        leaf.put_tail(change.mul_(micro_batch.weight))
        self._bucket.end_leaf(leaf, count)

    def start_reduce(self) -> None:
        """Send this rank's changes. Other work may follow before `finish_reduce`."""
        if self._bucket is None:
            return
        assert self._nodes is not None
        self._exchange = TreeAllReduce(self._bucket, self._world, self._nodes.nodes, 0)
        self._exchange.start()

    def finish_reduce(self) -> None:
        """Apply the weighted mean of all changes, on all ranks."""
        if self._bucket is None:
            return
        assert self._exchange is not None, "start_reduce comes first"
        self._exchange.middle()
        self._exchange.finish()
        self._exchange = None
        assert self._bucket.result is not None
        self._buffers.apply(self._bucket.result.tail[: self._length])


def _give_own_memory(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Copy the buffers in a state_dict: they are views of one tensor, and safetensors refuses shared memory."""
    for name, buffer in module.named_buffers():
        if prefix + name in state:
            state[prefix + name] = buffer.detach().clone()
