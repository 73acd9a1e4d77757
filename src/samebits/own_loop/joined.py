"""One all-reduce for two small buckets of a loop: gradients, and what the buffers have changed by.

Posting a message and its receive takes about half a millisecond, whatever its size: a twentieth of a small network's
step. An all-reduce adds value by value, so it does not matter for the bits which bucket a value is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samebits.cluster.world import World
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.halving import make_all_reduce
from samebits.parallel.tree import Node

JOINED_BYTES = 1 << 20  # of a bucket: copying a larger one costs as much as a message


class JoinedAllReduce:
    """The all-reduce of several buckets in one step, with the methods of a `TreeAllReduce`.

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
        memory.start_step(0)
        memory.nodes = [(node, memory.flat()) for node, _ in parts[0].nodes]
        self._all_reduce = make_all_reduce(memory, world, nodes, tag)

    def start(self) -> None:
        """Send copies of this rank's nodes."""
        for (_, flat), *own in zip(self._memory.nodes, *(part.nodes for part in self._parts), strict=True):
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
