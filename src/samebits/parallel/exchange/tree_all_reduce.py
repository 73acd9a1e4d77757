"""All-reduce of a bucket in tree order, by point-to-point messages.

A library's all-reduce chooses its own order of additions, which depends on the world. Here every way of exchanging adds
in the brackets of `tree.py`:

    one machine                          all to all, in one or two rounds (`part.py`)
      or with one partner a round, with small messages to more than 16 ranks (`halving.py`)
    machines with several ranks          inside a machine, between machines in one of the ways above, and inside again
                                         (`two_level.py`)
"""

from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Protocol

import torch.distributed as dist

from samebits.cluster.backends import group_for
from samebits.cluster.views.waits import wait_for_peers
from samebits.cluster.world import World
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.halving import exchange_by_halving, follow_each_other, is_in_rounds
from samebits.parallel.exchange.part import Message, Part, Rounds, exchange_directly
from samebits.parallel.exchange.two_level import exchange_in_two_levels, shares
from samebits.parallel.tree import Node

SMALL_BYTES = 2 * 1024 * 1024  # sent by a rank; below this, a second round costs more than the bytes it saves
# The same between machines: 0.13 ms at 1 Gbit/s, about as long as a round.
SAVED_BYTES = 16 * 1024
# A smaller bucket is sent to all ranks of all machines in one round: two rounds inside the machines take longer.
FLAT_BYTES = 16 * 1024
Way = Callable[[Part], Rounds]  # of exchanging the values of a part


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> object:
        """Return when they have arrived, or have been sent."""


@singledispatch  # a simulated world has a network of its own
def post(world: World, messages: Sequence[Message], group: dist.ProcessGroup | None = None) -> Sequence[Work]:
    """Start messages, in order. `group`: the world's `gloo_group` when the exchange began; None: the present one."""
    if world.backend != "gloo":
        calls = [dist.irecv if message.is_receive else dist.isend for message in messages]
        each = zip(calls, messages, strict=True)
        return dist.batch_isend_irecv([dist.P2POp(call, it.values, it.peer, tag=it.tag) for call, it in each])
    # batch_isend_irecv makes the same calls, in four times the time: a tenth of a millisecond in each step.
    groups = [group_for(message.peer, is_receive=message.is_receive, default=group) for message in messages]
    return [
        (group.recv if message.is_receive else group.send)([message.values], message.peer, message.tag)
        for group, message in zip(groups, messages, strict=True)
    ]


def wait_all(works: Sequence[Work]) -> None:
    """Wait until all messages have arrived, or have been sent."""
    for work in works:
        work.wait()


class TreeAllReduce:
    """The all-reduce of one bucket in one step: `start`, then `advance` until it returns True.

    All ranks make these calls in the same order. The last `advance` sets the bucket's `result`.
    """

    def __init__(self, bucket: Bucket, world: World, nodes: list[list[Node]], tag: int) -> None:
        self._bucket, self._world, self._nodes = bucket, world, nodes
        self._tag = tag
        #: The way of exchanging; see `part.py`.
        self.way = way_for(world, nodes, bucket.length * bucket.dtype.itemsize)
        # gloo has no point-to-point messages of CUDA tensors, so they go through the host.
        self._is_via_host = bucket.device.type == "cuda" and world.backend == "gloo" and world.size > 1
        self._result = bucket.nodes[0][1] if bucket.nodes else bucket.flat()
        self._total = self._result.values
        # A thread may still advance this when a rank is lost: it must not send to the group that is formed next.
        self._group = world.gloo_group
        self._works: Sequence[Work] = []
        self._rounds: Rounds = iter(())
        self.has_added = False  #: Whether this rank's partial sums have been overwritten by sums over ranks.

    def start(self) -> None:
        """Start the messages of the first round."""
        bucket = self._bucket
        # Where messages can be sent from; the total as well.
        values = [flat.values.cpu() if self._is_via_host else flat.values for _, flat in bucket.nodes]
        if self._is_via_host:
            self._total = values[0] if values else self._total.cpu()
        part = Part(
            rank=self._world.rank,
            members=range(self._world.size),
            nodes=self._nodes,
            held=[(node, each) for (node, _), each in zip(bucket.nodes, values, strict=True)],
            total=self._total,
            num_leaves=max(last for own in self._nodes for _, last in own),
            exact=bucket.exact,
            tag=self._tag,
            borrow=partial(bucket.borrow, on_host=self._is_via_host),
        )
        self._rounds = self.way(part)
        self._post(next(self._rounds))

    def advance(self) -> bool:
        """Wait for the messages of a round, add, and start the next round; return whether the sum is complete."""
        if self._works:
            wait_for_peers(self._world.membership, partial(wait_all, self._works))
        self._works = []
        # From here on this rank's own sums are overwritten. After a loss they must not count as whole
        # (`recoverable.py`).
        self.has_added = True
        messages = next(self._rounds, None)
        if messages is not None:
            self._post(messages)
            return False
        if self._is_via_host:
            self._result.values.copy_(self._total)
        self._bucket.settle(self._result)
        self._group = None  # else it would live as long as this step, with its threads
        return True

    def _post(self, messages: list[Message]) -> None:
        if messages:  # one process may have no group
            # Receives first: gloo notifies the sender of each posted receive. Behind a large send that notification is
            # late, and a slow link then carries one direction at a time (measured by benchmarks/link.py).
            messages.sort(key=lambda message: not message.is_receive)
            self._works = post(self._world, messages, self._group)


def way_for(world: World, nodes: list[list[Node]], num_bytes: int) -> Way:
    """Return the way of exchanging a bucket of `num_bytes`, given each rank's nodes. Equal on all ranks."""
    if world.num_hosts > 1 and num_bytes > FLAT_BYTES:
        return partial(exchange_in_two_levels, machines=world.machines, between=_between)
    if is_in_rounds(world.size, num_bytes) and follow_each_other(nodes):
        return exchange_by_halving
    return partial(exchange_directly, in_chunks=num_bytes * (world.size - 1) > SMALL_BYTES)


def _between(part: Part) -> Rounds:
    """Sum a slice of a bucket, each of whose members is on another machine."""
    others, num_bytes = len(part.members) - 1, part.total.nbytes
    if is_in_rounds(others + 1, num_bytes) and follow_each_other(part.nodes):
        return exchange_by_halving(part)
    num_nodes = tuple(map(len, part.nodes))
    saved = num_bytes * others * (max(num_nodes) - 2 / (others + 1))
    in_chunks = num_bytes * others > SMALL_BYTES or saved > SAVED_BYTES
    return exchange_directly(part, in_chunks=in_chunks, shares=shares(num_nodes))
