"""What a group of ranks sums: a bucket or a slice of it, and the exchange in one or two rounds.

A way of exchanging is a generator: it yields the messages of a round, and continues once they have arrived and have
been sent. Each rank has a few nodes of the tree, which every other rank computes from the step alone, so messages need
no headers. With W ranks:

    small part, one round            large part, two rounds (reduce-scatter, all-gather)
    send all nodes to all            send chunk r of all nodes to rank r
    add all nodes                    add all nodes' chunk of this rank, send the sum to all
                                     receive the other chunks

Two rounds take as many bytes as a ring all-reduce: 2 (W-1)/W of the part, for one node a rank.

Measured with gloo over loopback, two processes: one round of 87 KB took a third, two rounds of 47 MB two thirds of the
time of gloo's all-reduce. gloo's all-gather was slower than both.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from torch import Tensor

from samebits.parallel.bucket import ALIGNMENT, round_up
from samebits.parallel.tree import Node, merged, push

# Tags of the messages between two ranks. Messages of several buckets that are under way must differ in theirs.
#
# Those of one bucket may not: messages with one tag arrive in the order in which they were posted
# (`exchange_in_two_levels`).
#
#      bit  31   30   29          16 15       6 5      0
#          +----+----+--------------+----------+--------+
#          | 0  | L  |  sum         |  bucket  |  part  |
#          +----+----+--------------+----------+--------+
#            |    |     |              |          node of the sender's tree, by its index; RESULT: a sum of ranks
#            |    |     |              bucket of the sum
#            |    |     sum: 0 for the engine's and for the buffers of an own loop, else one of the own loop's sums
#            |    layer: a sum within a forward or backward pass (synchronized batch norm)
#            sign: gloo takes tags as unsigned, torch as signed ints
#
# The engine has one sum, so a model with more than 1,024 buckets may use the bits of the sum as well.


RESULT = 63  # follows the indices of nodes; a rank has at most one node per level of the tree, on either side
LAYER = 1 << 30


def bucket_tag(bucket: int, sum_number: int = 0) -> int:
    """Return the tag of the first part of a bucket; add the part."""
    return (sum_number << 10 | bucket) << 6


Held = list[tuple[Node, Tensor]]


class Message(NamedTuple):
    """A point-to-point message."""

    values: Tensor  #: (N,) what is sent, or the memory for it.
    peer: int  #: The other rank.
    tag: int  #: Distinguishes it from the other messages between the two (`tags.py`).
    is_receive: bool  #: Whether this rank receives it.


Rounds = Iterator[list[Message]]


@dataclass
class Part:
    """Values that a group of ranks sums, seen from one of them."""

    rank: int  #: This rank.
    members: Sequence[int]  #: The ranks of the group.
    nodes: Sequence[list[Node]]  #: For each member, its nodes.
    held: Held  #: This rank's nodes, each with its sum, (length,). The memory is overwritten by sums over ranks.
    total: Tensor  #: (length,) memory for the sum of all nodes. May be that of the first one.
    num_leaves: int  #: Leaves of the whole tree.
    tag: int  #: Of the bucket, from `bucket_tag`.
    borrow: Callable[[int], Tensor]  #: Returns memory for so many values of another rank.
    _messages: list[Message] = field(default_factory=list)

    @property
    def place(self) -> int:
        """Index of this rank among the members."""
        return self.members.index(self.rank)

    def send(self, values: Tensor, place: int, tag: int) -> None:
        """Add a message to a member, (N,), to the round."""
        if values.numel():  # otherwise the receiver knows
            self._messages.append(
                Message(values, self.members[place], self.tag + tag, is_receive=False)
            )

    def receive(self, values: Tensor, place: int, tag: int) -> None:
        """Add a message from a member, (N,), to the round."""
        if values.numel():
            self._messages.append(
                Message(values, self.members[place], self.tag + tag, is_receive=True)
            )

    def receive_nodes(self, nodes: Sequence[Node], place: int, length: int) -> Held:
        """Add messages with nodes of a member, (length,) each, to the round; return the memory for them."""
        held = [(node, self.borrow(length)) for node in nodes]
        for index, (_, values) in enumerate(held):
            self.receive(values, place, index)
        return held

    def round(self) -> list[Message]:
        """Return the messages of the round, and begin the next one."""
        messages = self._messages
        self._messages = []
        return messages

    def add(
        self, entries: Iterable[tuple[Node, Tensor]], destination: Tensor | None = None
    ) -> Held:
        """Add siblings, (N,) each, and return the nodes that are left.

        Args:
            entries: Nodes with their sums. The memory is overwritten.
            destination: Where the sum is needed, if its memory is that of one of the nodes.
        """
        stack: Held = []

        def add(left: Tensor, right: Tensor) -> Tensor:
            # a + b and b + a have the same bits, so the sum may be formed in the memory where it is needed.
            if destination is not None and right.data_ptr() == destination.data_ptr():
                left, right = right, left
            return left.add_(right)

        # In the order of the leaves, so that each rank merges in the same order without a message about it.
        for node, values in sorted(entries, key=lambda entry: entry[0]):
            push(stack, node, values, self.num_leaves, add)
        return stack


def cuts(length: int, shares: Sequence[int]) -> list[int]:
    """Cut [0, length) into aligned chunks in the ratio of the shares; return where they start, and the length."""
    total = sum(shares)
    return [
        min(length, round_up(-(-length * start // total), ALIGNMENT))
        for start in accumulate(shares, initial=0)
    ]


def exchange_directly(part: Part, *, in_chunks: bool, shares: Sequence[int] = ()) -> Rounds:
    """Sum a part by messages to all members, in one round or in two, in chunks; `shares`: of each, if not equal."""
    size = len(part.members)
    me = part.place
    bounds = cuts(part.total.numel(), shares or (1,) * size)

    def chunk(values: Tensor, owner: int) -> Tensor:
        return values[bounds[owner] : bounds[owner + 1]] if in_chunks else values

    # Each rank starts with its right neighbor, so that not all send to rank 0 first.
    peers = [(me + distance) % size for distance in range(1, size)]
    entries = [(node, chunk(values, me)) for node, values in part.held]
    destination = chunk(part.total, me)
    for peer in peers:
        for index, (_, values) in enumerate(part.held):
            part.send(chunk(values, peer), peer, index)
        entries += part.receive_nodes(part.nodes[peer], peer, destination.numel())
    yield part.round()
    ((_, total),) = part.add(entries, destination)
    if total.data_ptr() != destination.data_ptr():
        destination.copy_(total)
    if in_chunks:
        for peer in peers:
            part.send(destination, peer, RESULT)
            part.receive(chunk(part.total, peer), peer, RESULT)
        yield part.round()


# All-reduce of a part in a large world: recursive halving, then doubling, in tree order.
#
# `exchange_directly` sends a message to each other rank. Here a rank has one partner a round, so with W ranks it sends
# 2 log2(W) messages for each of its nodes, of as many bytes in total. Eight ranks, seen from rank 0:
#
#     exchange halves with rank 1       keep the first half of the nodes of ranks 0-1
#     exchange quarters with rank 2     keep the first quarter of the nodes of ranks 0-3
#     exchange eighths with rank 4      the first eighth is complete
#     receive the other eighth of a quarter from rank 4, the other quarter from 2, the other half from 1
#
# Neighbors hold neighboring micro-batches, so what a group of ranks holds is an interval of leaves, summed in the
# brackets of `tree.py`. With W between two powers of two, some ranks (guests) first give their nodes to their left
# neighbor (host), and receive the complete sum from it at the end.
#
# Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH (2005).


# One message to each rank at the same time is faster than one round after another in a small world, and where the
# messages are large: it then takes fewer bytes if the number of ranks is no power of two.
DIRECT_SIZE = 16
SMALL_MESSAGE_BYTES = 64 * 1024


def is_in_rounds(size: int, num_bytes: int) -> bool:
    """Return whether values of `num_bytes` are reduced in rounds by a group of this size."""
    return size > DIRECT_SIZE and num_bytes < size * SMALL_MESSAGE_BYTES


def follow_each_other(nodes: Sequence[list[Node]]) -> bool:
    """Return whether the nodes are in the order of the ranks. They are not after a loss within a step."""
    return all(left[1] == right[0] for left, right in pairwise(chain(*nodes)))


def exchange_by_halving(part: Part) -> Rounds:
    """Sum a part by messages to one partner a round. The nodes of neighboring members follow each other."""
    num_rounds = len(part.members).bit_length() - 1
    num_pairs = len(part.members) - (1 << num_rounds)  # of host and guest: the first members
    me = part.place
    total = part.total
    length = part.total.numel()
    is_paired = me < 2 * num_pairs
    if is_paired and me % 2:
        for index, (_, values) in enumerate(part.held):
            part.send(values, me - 1, index)
        yield part.round()
        part.receive(total, me - 1, RESULT)
        yield part.round()
        return
    position = me // 2 if is_paired else me - num_pairs
    chunk_size = -(-length // (1 << num_rounds))

    def member(position: int) -> int:
        return position + min(position, num_pairs)

    def offset(chunk: int) -> int:
        return min(chunk * chunk_size, length)

    held = part.held
    if is_paired:
        given = part.receive_nodes(part.nodes[me + 1], me + 1, length)
        yield part.round()
        held = part.add([*held, *given])
    # the chunks that this rank still holds of its nodes
    first = 0
    last = 1 << num_rounds
    for number in range(num_rounds):
        middle = (first + last) // 2
        is_right = position >> number & 1
        cut = offset(middle) - offset(first)
        partner = position ^ (1 << number)
        for index, (_, values) in enumerate(held):
            part.send(values[:cut] if is_right else values[cut:], member(partner), index)
        kept = [(node, values[cut:] if is_right else values[:cut]) for node, values in held]
        first, last = (middle, last) if is_right else (first, middle)
        group = partner >> number << number
        # Those that the members of its group have after they have merged theirs.
        theirs = part.nodes[member(group) : member(group + (1 << number))]
        nodes = merged(chain(*theirs), part.num_leaves)
        received = part.receive_nodes(nodes, member(partner), offset(last) - offset(first))
        yield part.round()
        # The partner's nodes may be to the left or to the right of this rank's.
        held = part.add([*kept, *received])
    ((_, found),) = held
    destination = total[offset(first) : offset(last)]
    # The sum may lie in the memory of a message, by the order in which nodes were merged.
    if found.data_ptr() != destination.data_ptr():
        destination.copy_(found)
    for number in reversed(range(num_rounds)):
        # Exchange the complete sums of two neighboring runs of chunks.
        width, partner = last - first, member(position ^ (1 << number))
        other = (first - width, first) if position >> number & 1 else (last, last + width)
        part.send(total[offset(first) : offset(last)], partner, RESULT)
        part.receive(total[offset(other[0]) : offset(other[1])], partner, RESULT)
        first = min(first, other[0])
        last = max(last, other[1])
        yield part.round()
    if is_paired:
        part.send(total, me + 1, RESULT)
        yield part.round()


# The rounds in which ranks exchange small sums: with all others at once, or by recursive doubling in a large world.
#
# Gradients are halved (`exchange_by_halving`) since their bytes count. Sums inside a pass are a few kilobytes, so only
# messages count: in each round a rank sends all that it holds to one partner. Eight ranks with a node each, seen from
# rank 0:
#
#     round 0   send (0,1) to rank 1, receive (1,2)      hold (0,2)
#     round 1   send (0,2) to rank 2, receive (2,4)      hold (0,4)
#     round 2   send (0,4) to rank 4, receive (4,8)      hold (0,8), the total
#
# Neighbors hold neighboring micro-batches, so partners add siblings of `tree.py`. With W between two powers of two,
# some ranks (guests) first give their nodes to their left neighbor (host), and receive the total from it at the end.
#
# Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH (2005).


class Round(NamedTuple):
    """Messages that a rank sends and receives at the same time."""

    sends_to: tuple[int, ...]  #: Ranks that receive all nodes that this rank holds.
    nodes_from: dict[int, list[Node]]  #: The nodes that other ranks send, by rank.
    is_total: bool = False  #: Whether the received nodes contain those that were sent.


def plan_rounds(
    rank: int, nodes: Sequence[list[Node]], num_leaves: int, num_bytes: int
) -> list[Round]:
    """Return the rounds of a rank that has nodes; none if no other rank has any."""
    # A rank without a micro-batch contributes nothing and needs no total.
    members = [other for other, own in enumerate(nodes) if own]
    if not (is_in_rounds(len(members), num_bytes) and follow_each_other(nodes)):
        peers = [other for other in members if other != rank]
        return [Round((*peers,), {peer: nodes[peer] for peer in peers})] if peers else []
    num_rounds = len(members).bit_length() - 1
    num_pairs = len(members) - (1 << num_rounds)  # of host and guest: the first members

    def held(first: int, last: int) -> list[Node]:
        return merged(chain(*(nodes[member] for member in members[first:last])), num_leaves)

    def index(place: int) -> int:
        return place + min(place, num_pairs)

    mine = members.index(rank)
    is_paired = mine < 2 * num_pairs
    if is_paired and mine % 2:
        return [
            Round((members[mine - 1],), {members[mine - 1]: held(0, len(members))}, is_total=True)
        ]
    place = mine // 2 if is_paired else mine - num_pairs
    rounds = []
    for number in range(num_rounds):
        partner = place ^ (1 << number)
        group = partner >> number << number
        other = members[index(partner)]
        rounds.append(Round((other,), {other: held(index(group), index(group + (1 << number)))}))
    if is_paired:
        guest = members[mine + 1]
        rounds = [Round((), {guest: nodes[guest]}), *rounds, Round((guest,), {})]
    return rounds
