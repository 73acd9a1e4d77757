"""Sums a bucket over all ranks in tree order, by point-to-point messages.

A rank holds a few nodes of the tree, known to all by arithmetic. Small buckets: each rank sends its nodes to all
others, and each adds them up: one round. Large ones: rank r adds up the r-th chunk of all nodes, then sends the sum to
all others: two rounds, and as many bytes as a ring all-reduce, 2 (W-1)/W of the bucket for one node a rank.

Measured on gloo over loopback, two processes: a swap of 87 KB took a third, one of 47 MB two thirds of the time of an
all-reduce, and gloo's own all-gather was the slowest way of all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.cluster.world import World
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.tree import Node, push

SMALL_BYTES = 2 * 1024 * 1024  # sent by a rank; below this, another round costs more than bytes


class TreeAllReduce:
    """One bucket's way through one step. Call `start`, `middle` and `finish`, in the same order on all ranks.

    Args:
        bucket: Its `nodes` are this rank's part of the sum; `result` will be the whole.
        world: The ranks.
        nodes: For each rank, the nodes that it holds.
        tag: Differs between buckets.
    """

    def __init__(self, bucket: Bucket, world: World, nodes: list[list[Node]], tag: int) -> None:
        self._bucket, self._world, self._nodes = bucket, world, nodes
        self._tag = tag * 64
        self._num_leaves = max(last for held in nodes for _, last in held)
        self._in_chunks = bucket.length * bucket.dtype.itemsize * (world.size - 1) > SMALL_BYTES
        # gloo sends no CUDA tensors from point to point: they go by way of the host.
        self._by_host = bucket.device.type == "cuda" and world.backend == "gloo" and world.size > 1
        self._result = bucket.nodes[0][1] if bucket.nodes else bucket.flat()
        self._sums: dict[Node, Tensor] = {}
        self._home = self._result.values
        self._works: list[dist.Work] = []
        self._messages: list[dist.P2POp] = []

    def start(self) -> None:
        """Send this rank's nodes, or their chunks, and open the ears for the others'."""
        bucket, me = self._bucket, self._world.rank
        mine = [flat.values.cpu() if self._by_host else flat.values for _, flat in bucket.nodes]
        self._sums = {node: values for (node, _), values in zip(bucket.nodes, mine, strict=True)}
        if self._by_host:
            self._home = mine[0] if mine else self._home.cpu()
        for peer in self._peers():
            for place, values in enumerate(mine):
                self._send(self._chunk(values, peer), peer, place)
            for place, node in enumerate(self._nodes[peer]):
                self._sums[node] = bucket.borrow(on_host=self._by_host)
                self._receive(self._chunk(self._sums[node], me), peer, place)
        self._go()

    def middle(self) -> None:
        """Add up what this rank answers for; for large buckets, send the sum to the others."""
        self._wait()
        destination = self._chunk(self._home, self._world.rank)
        stack: list[tuple[Node, Tensor]] = []

        def add(left: Tensor, right: Tensor) -> Tensor:
            # Two operands commute, so the sum may stay in whichever is already at home.
            if right.data_ptr() == destination.data_ptr():
                left, right = right, left
            return left.add_(right)

        for node in sorted(self._sums):
            chunk = self._chunk(self._sums[node], self._world.rank)
            if self._bucket.exact or not stack:
                push(stack, node, chunk, self._num_leaves, add)
            else:
                stack[0] = ((0, node[1]), add(stack[0][1], chunk))
        ((_, total),) = stack
        if total.data_ptr() != destination.data_ptr():
            destination.copy_(total)
        if self._in_chunks:
            for peer in self._peers():
                self._send(destination, peer, 63)
                self._receive(self._chunk(self._home, peer), peer, 63)
            self._go()

    def finish(self) -> None:
        """Wait for the whole sum."""
        self._wait()
        if self._by_host:
            self._result.values.copy_(self._home)
        self._bucket.settle(self._result)

    def _peers(self) -> list[int]:
        # Each rank begins with its right neighbour, so that not all send to rank 0 first.
        return [(self._world.rank + distance) % self._world.size for distance in range(1, self._world.size)]

    def _chunk(self, values: Tensor, owner: int) -> Tensor:
        if not self._in_chunks:
            return values
        size = self._bucket.length // self._world.size
        return values[owner * size : (owner + 1) * size]

    def _send(self, values: Tensor, peer: int, place: int) -> None:
        self._messages.append(dist.P2POp(dist.isend, _sendable(values), peer, tag=self._tag + place))

    def _receive(self, values: Tensor, peer: int, place: int) -> None:
        self._messages.append(dist.P2POp(dist.irecv, _sendable(values), peer, tag=self._tag + place))

    def _go(self) -> None:
        if self._messages:
            # Receives first: gloo tells the sender of each, and behind a large send of our own that news comes late, so
            # that a slow link carries one direction at a time (benchmarks/link.py).
            self._messages.sort(key=lambda message: message.op is not dist.irecv)
            self._works = dist.batch_isend_irecv(self._messages)
            self._messages = []

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def _sendable(values: Tensor) -> Tensor:
    """The same memory; not every backend knows of halves."""
    return values if values.dtype == torch.float32 else values.view(torch.uint8)
