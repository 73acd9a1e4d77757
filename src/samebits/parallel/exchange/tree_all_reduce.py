"""All-reduce of a bucket in tree order, by point-to-point messages.

A library's all-reduce chooses its own order of additions, which depends on the world. Here every way of exchanging adds
in the brackets of `tree.py`:

    one machine                          all to all, in one or two rounds (`part.py`)
      or with one partner a round, with small messages to more than 16 ranks (`exchange_by_halving`)
    machines with several ranks          inside a machine, between machines in one of the ways above, and inside again
                                         (`exchange_in_two_levels`)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial, singledispatch
from itertools import zip_longest
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from samebits.cluster.views.torch_traps import wait_for_peers
from samebits.cluster.world import World, group_for
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.part import (
    RESULT,
    Message,
    Part,
    Rounds,
    cuts,
    exchange_by_halving,
    exchange_directly,
    follow_each_other,
    is_in_rounds,
)
from samebits.parallel.tree import Node, merged

# All-reduce of a part over machines with several ranks each, which sends each value out of a machine once.
#
# Slices of a part are summed inside a machine first, then between machines, each slice by one rank of each machine. Two
# machines with ranks 0 1 and 2 3, two slices, seen from rank 0:
#
#     inside    send slice 1 of own nodes to rank 1, receive slice 0 of rank 1's nodes       add: nodes of the machine
#     between   exchange slice 0 with rank 2, which has slice 0 of the other machine's nodes  add: slice 0 is complete
#     inside    send slice 0 of the sum to rank 1, receive slice 1
#
# There are as many slices as ranks on the largest machine. On a machine with fewer ranks, a rank has several:
#
#     4 + 2 ranks     slice        0  1  2  3
#                     machine 0    0  1  2  3     the rank that exchanges the slice with the other machine
#                     machine 1    4  4  5  5
#
# The nodes of a machine are those of its ranks after siblings are merged: a single one where its micro-batches are a
# complete subtree (`data/division.py`). The brackets are those of `tree.py`, so all ways have the same bits.


def exchange_in_two_levels(
    part: Part, *, machines: Sequence[int], between: Callable[[Part], Rounds]
) -> Rounds:
    """Sum a part inside machines, one number for each member, and slices of it `between` them."""
    groups, nodes = _layout(tuple(machines), tuple(map(tuple, part.nodes)), part.num_leaves)
    num_slices = max(map(len, groups))
    bounds = cuts(part.total.numel(), (1,) * num_slices)
    here = next(group for group in groups if part.place in group)
    me = here.index(part.place)
    # Each rank starts with its right neighbor, so that not all send to the first one.
    peers = [here[(me + distance) % len(here)] for distance in range(1, len(here))]

    def region(values: Tensor, place: int) -> Tensor:
        first, last = _slices(here.index(place), len(here), num_slices)
        return values[bounds[first] : bounds[last]]

    destination = region(part.total, part.place)
    entries = [(node, region(values, part.place)) for node, values in part.held]
    for peer in peers:
        for index, (_, values) in enumerate(part.held):
            part.send(region(values, peer), peer, index)
        entries += part.receive_nodes(part.nodes[peer], peer, destination.numel())
    if peers:
        yield part.round()
    entries = part.add(entries, destination)
    first, last = _slices(me, len(here), num_slices)
    exchanges = []
    for number in range(first, last):
        start = bounds[number] - bounds[first]
        stop = bounds[number + 1] - bounds[first]
        # The inverse of `_slices`: the rank of each machine that has the slice.
        members = [
            part.members[group[((number + 1) * len(group) - 1) // num_slices]] for group in groups
        ]
        held = [(node, values[start:stop]) for node, values in entries]
        exchanges.append(
            between(
                replace(
                    part,
                    members=members,
                    nodes=nodes,
                    held=held,
                    total=destination[start:stop],
                    _messages=[],
                )
            )
        )
    # Messages of several slices to one rank have the same tags. They arrive in the order in which they were posted.
    for rounds in zip_longest(*exchanges):
        yield [message for messages in rounds for message in messages or ()]
    for peer in peers:
        part.send(destination, peer, RESULT)
        part.receive(region(part.total, peer), peer, RESULT)
    if peers:
        yield part.round()


def _slices(place: int, num_ranks: int, num_slices: int) -> tuple[int, int]:
    """Return the slices [first, last) of a rank of a machine."""
    return place * num_slices // num_ranks, (place + 1) * num_slices // num_ranks


@lru_cache(64)  # the same in all steps of a run, but for those after a loss
def _layout(
    machines: tuple[int, ...], nodes: tuple[tuple[Node, ...], ...], num_leaves: int
) -> tuple[list[list[int]], list[list[Node]]]:
    """Return the members of each machine, and its nodes. Machines are in the order of their leaves."""
    found = []
    for machine in dict.fromkeys(machines):
        group = [place for place, each in enumerate(machines) if each == machine]
        own = sorted(node for place in group for node in nodes[place])
        own = merged(own, num_leaves)
        found.append((own, group))
    found.sort(key=lambda entry: entry[0][0] if entry[0] else (num_leaves, num_leaves))
    return [group for _, group in found], [own for own, _ in found]


@lru_cache(64)
def shares(num_nodes: tuple[int, ...]) -> list[int]:
    """Return the share of the values that each machine adds, by its nodes, so that the busiest link carries the least.

    A machine sends its nodes of what others add, and the sum of what it adds to all others. So a machine with several
    nodes adds more: of two machines, one with 2 nodes adds all, and both send each value once instead of 1.5 times.
    """
    size = len(num_nodes)
    every = sum(num_nodes)
    if {*num_nodes} == {1}:
        return [1] * size
    units = [0] * size
    num_units = 16 * size

    def busiest(taken: int) -> int:
        """Return what the busiest link carries in either direction, in units, if one more is added there."""
        loads = []
        for machine, nodes in enumerate(num_nodes):
            own = units[machine] + (machine == taken)
            loads += [
                nodes * (num_units - own) + (size - 1) * own,
                (every - nodes) * own + num_units - own,
            ]
        return max(loads)

    for _ in range(num_units):
        # The lowest of several, so that all ranks agree.
        units[
            min(range(size), key=lambda machine: (busiest(machine), units[machine], machine))
        ] += 1
    return units


# sent by a rank; below this, a second round costs more than the bytes it saves
SMALL_BYTES = 2 * 1024 * 1024
# The same between machines: 0.13 ms at 1 Gbit/s, about as long as a round.
SAVED_BYTES = 16 * 1024
# A smaller bucket is sent to all ranks of all machines in one round: two rounds inside the machines take longer.
FLAT_BYTES = 16 * 1024
Way = Callable[[Part], Rounds]  # of exchanging the values of a part


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> object:
        """Return when they have arrived, or have been sent."""


@singledispatch  # the virtual ranks of the tests have a network of their own
def post(
    world: World, messages: Sequence[Message], group: dist.ProcessGroup | None = None
) -> Sequence[Work]:
    """Start messages, in order. `group`: the world's `gloo_group` when the exchange began; None: the present one."""
    if world.backend != "gloo":
        calls = [dist.irecv if message.is_receive else dist.isend for message in messages]
        each = zip(calls, messages, strict=True)
        return dist.batch_isend_irecv(
            [dist.P2POp(call, it.values, it.peer, tag=it.tag) for call, it in each]
        )
    # batch_isend_irecv makes the same calls, in four times the time: a tenth of a millisecond in each step.
    groups = [
        group_for(message.peer, is_receive=message.is_receive, default=group)
        for message in messages
    ]
    return [
        (group.recv if message.is_receive else group.send)(
            [message.values], message.peer, message.tag
        )
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
        self._bucket = bucket
        self._world = world
        self._nodes = nodes
        self._tag = tag
        #: The way of exchanging; see `part.py`.
        self.way = way_for(world, nodes, 4 * bucket.length)
        # gloo has no point-to-point messages of CUDA tensors, so they go through the host.
        self._is_via_host = (
            bucket.device.type == "cuda" and world.backend == "gloo" and world.size > 1
        )
        self._result = bucket.nodes[0][1] if bucket.nodes else bucket.flat()
        self._total = self._result.values
        # A thread may still advance this when a rank is lost: it must not send to the group that is formed next.
        self._group = world.gloo_group
        self._works: Sequence[Work] = []
        self._rounds: Rounds = iter(())
        self.has_added = (
            False  #: Whether this rank's partial sums have been overwritten by sums over ranks.
        )

    def start(self) -> None:
        """Start the messages of the first round."""
        bucket = self._bucket
        # Where messages can be sent from; the total as well.
        values = [
            flat.values.cpu() if self._is_via_host else flat.values for _, flat in bucket.nodes
        ]
        if self._is_via_host:
            self._total = values[0] if values else self._total.cpu()
        part = Part(
            rank=self._world.rank,
            members=range(self._world.size),
            nodes=self._nodes,
            held=[(node, each) for (node, _), each in zip(bucket.nodes, values, strict=True)],
            total=self._total,
            num_leaves=max(last for own in self._nodes for _, last in own),
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
    others = len(part.members) - 1
    num_bytes = part.total.nbytes
    if is_in_rounds(others + 1, num_bytes) and follow_each_other(part.nodes):
        return exchange_by_halving(part)
    num_nodes = tuple(map(len, part.nodes))
    saved = num_bytes * others * (max(num_nodes) - 2 / (others + 1))
    in_chunks = num_bytes * others > SMALL_BYTES or saved > SAVED_BYTES
    return exchange_directly(part, in_chunks=in_chunks, shares=shares(num_nodes))
