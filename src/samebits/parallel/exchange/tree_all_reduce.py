"""All-reduce of a bucket in tree order, by point-to-point messages.

A library's all-reduce chooses its own order of additions, which depends on the world. Here each rank has a few nodes of
the tree, which every other rank computes from the step alone, so messages need no headers. With W ranks:

    small bucket, one round               large bucket, two rounds (reduce-scatter, all-gather)
    start    send all nodes to all        start    send chunk r of all nodes to rank r
    middle   add all nodes                middle   add all nodes' chunk of this rank, send the sum to all
    finish                                finish   receive the other chunks

A large bucket takes as many bytes as a ring all-reduce: 2 (W-1)/W of the bucket, for one node a rank.

Measured with gloo over loopback, two processes: one round of 87 KB took a third, two rounds of 47 MB two thirds of the
time of gloo's all-reduce. gloo's all-gather was slower than both.
"""

from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.cluster.backends import group_for
from samebits.cluster.world import World
from samebits.parallel.bucket import ALIGNMENT, Bucket, round_up
from samebits.parallel.exchange.tags import RESULT
from samebits.parallel.tree import Node, push

SMALL_BYTES = 2 * 1024 * 1024  # sent by a rank; below this, a second round costs more than the bytes it saves


class Message(NamedTuple):
    """A point-to-point message."""

    values: Tensor  #: (N,) what is sent, or the memory for it.
    peer: int  #: The other rank.
    tag: int  #: Distinguishes it from the other messages between the two (`tags.py`).
    is_receive: bool  #: Whether this rank receives it.


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> object:
        """Return when they have arrived, or have been sent."""


@singledispatch  # a simulated world has a network of its own
def post(world: World, messages: Sequence[Message]) -> Sequence[Work]:
    """Start messages, in order."""
    if world.backend != "gloo":
        calls = [dist.irecv if message.is_receive else dist.isend for message in messages]
        each = zip(calls, messages, strict=True)
        return dist.batch_isend_irecv([dist.P2POp(call, it.values, it.peer, tag=it.tag) for call, it in each])
    # batch_isend_irecv makes the same calls, in four times the time: a tenth of a millisecond in each step.
    groups = [group_for(message.peer, is_receive=message.is_receive) for message in messages]
    return [
        (group.recv if message.is_receive else group.send)([message.values], message.peer, message.tag)
        for group, message in zip(groups, messages, strict=True)
    ]


class TreeAllReduce:
    """The all-reduce of one bucket in one step. Call `start`, `middle` and `finish` in the same order on all ranks.

    Args:
        bucket: Its `nodes` are this rank's partial sums. `finish` sets its `result`.
    """

    def __init__(self, bucket: Bucket, world: World, nodes: list[list[Node]], tag: int) -> None:
        self._bucket, self._world, self._nodes = bucket, world, nodes
        self._tag = tag
        self._num_leaves = max(last for own in nodes for _, last in own)
        self._in_chunks = bucket.length * bucket.dtype.itemsize * (world.size - 1) > SMALL_BYTES
        # gloo has no point-to-point messages of CUDA tensors, so they go through the host.
        self._is_via_host = bucket.device.type == "cuda" and world.backend == "gloo" and world.size > 1
        self._result = bucket.nodes[0][1] if bucket.nodes else bucket.flat()
        self._sums: dict[Node, Tensor] = {}
        self._total = self._result.values
        self._works: Sequence[Work] = []
        self._messages: list[Message] = []
        self.has_added = False  #: Whether this rank's partial sums have been overwritten by sums over ranks.

    def start(self) -> None:
        """Send this rank's nodes or their chunks, and post the receives of the other ranks' nodes."""
        bucket, me, mine = self._bucket, self._world.rank, self._own_values()
        self._sums = {node: self._chunk(values, me) for (node, _), values in zip(bucket.nodes, mine, strict=True)}
        length = self._chunk(self._total, me).numel()
        for peer in self._peers():
            for index, values in enumerate(mine):
                self._send(self._chunk(values, peer), peer, index)
            for index, node in enumerate(self._nodes[peer]):
                self._sums[node] = bucket.borrow(length, on_host=self._is_via_host)
                self._receive(self._sums[node], peer, index)
        self._post()

    def middle(self) -> None:
        """Add up the bucket, or this rank's chunk of a large one, and send the chunk's sum to all."""
        self._wait()
        # From here on this rank's own sums are overwritten. After
        # a loss they must not count as whole (`recoverable.py`).
        self.has_added = True
        destination = self._chunk(self._total, self._world.rank)
        stack: list[tuple[Node, Tensor]] = []

        def add(left: Tensor, right: Tensor) -> Tensor:
            # a + b and b + a have the same bits, so the sum may be formed in the memory where it is needed.
            if right.data_ptr() == destination.data_ptr():
                left, right = right, left
            return left.add_(right)

        # In the order of the leaves, so that each rank merges in the same order without a message about it.
        for node in sorted(self._sums):
            chunk = self._sums[node]
            if self._bucket.exact or not stack:
                push(stack, node, chunk, self._num_leaves, add)
            else:
                # Fast mode: any order.
                stack[0] = ((0, node[1]), add(stack[0][1], chunk))
        ((_, total),) = stack
        if total.data_ptr() != destination.data_ptr():
            destination.copy_(total)
        if self._in_chunks:
            for peer in self._peers():
                self._send(destination, peer, RESULT)
                self._receive(self._chunk(self._total, peer), peer, RESULT)
            self._post()

    def finish(self) -> None:
        """Wait for the complete sum, and set the bucket's `result`."""
        self._wait()
        if self._is_via_host:
            self._result.values.copy_(self._total)
        self._bucket.settle(self._result)

    def _own_values(self) -> list[Tensor]:
        """Return the values of this rank's nodes, where messages can be sent from, and put the total there."""
        mine = [flat.values.cpu() if self._is_via_host else flat.values for _, flat in self._bucket.nodes]
        if self._is_via_host:
            self._total = mine[0] if mine else self._total.cpu()
        return mine

    def _peers(self) -> list[int]:
        # Each rank starts with its right neighbor, so that not all send to rank 0 first.
        return [(self._world.rank + distance) % self._world.size for distance in range(1, self._world.size)]

    def _chunk(self, values: Tensor, owner: int) -> Tensor:
        if not self._in_chunks:
            return values
        # Equal chunks, unless the world has changed since the bucket was made: the last chunk is then shorter.
        size = round_up(-(-self._bucket.length // self._world.size), ALIGNMENT)
        return values[owner * size : (owner + 1) * size]

    def _send(self, values: Tensor, peer: int, tag: int) -> None:
        if values.numel() == 0:
            return  # the receiver knows
        self._messages.append(Message(_sendable(values), peer, self._tag + tag, is_receive=False))

    def _receive(self, values: Tensor, peer: int, tag: int) -> None:
        if values.numel() == 0:
            return
        self._messages.append(Message(_sendable(values), peer, self._tag + tag, is_receive=True))

    def _post(self) -> None:
        if self._messages:  # one process may have no group
            # Receives first: gloo notifies the sender of each posted receive. Behind a large send that notification is
            # late, and a slow link then carries one direction at a time (measured by benchmarks/link.py).
            self._messages.sort(key=lambda message: not message.is_receive)
            self._works = post(self._world, self._messages)
            self._messages = []

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


def _sendable(values: Tensor) -> Tensor:
    """Return the same memory as bytes for 16-bit dtypes, which not every backend can send."""
    return values if values.dtype == torch.float32 else values.view(torch.uint8)
