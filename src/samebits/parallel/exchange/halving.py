"""All-reduce of a part in a large world: recursive halving, then doubling, in tree order.

`exchange_directly` sends a message to each other rank. Here a rank has one partner a round, so with W ranks it sends
2 log2(W) messages for each of its nodes, of as many bytes in total. Eight ranks, seen from rank 0:

    exchange halves with rank 1       keep the first half of the nodes of ranks 0-1
    exchange quarters with rank 2     keep the first quarter of the nodes of ranks 0-3
    exchange eighths with rank 4      the first eighth is complete
    receive the other eighth of a quarter from rank 4, the other quarter from 2, the other half from 1

Neighbors hold neighboring micro-batches, so what a group of ranks holds is an interval of leaves, summed in the
brackets of `tree.py`. With W between two powers of two, some ranks (guests) first give their nodes to their left
neighbor (host), and receive the complete sum from it at the end.

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH (2005).
"""

from collections.abc import Sequence
from itertools import pairwise

from samebits.parallel.exchange.part import Part, Rounds
from samebits.parallel.exchange.tags import RESULT
from samebits.parallel.tree import Node, partials

# One message to each rank at the same time is faster than one round after another in a small world, and where the
# messages are large: it then takes fewer bytes if the number of ranks is no power of two.
DIRECT_SIZE = 16
SMALL_MESSAGE_BYTES = 64 * 1024


def is_in_rounds(size: int, num_bytes: int) -> bool:
    """Return whether values of `num_bytes` are reduced in rounds by a group of this size."""
    return size > DIRECT_SIZE and num_bytes < size * SMALL_MESSAGE_BYTES


def follow_each_other(nodes: Sequence[list[Node]]) -> bool:
    """Return whether the nodes are in the order of the ranks. They are not after a loss within a step."""
    every = [node for own in nodes for node in own]
    return all(left[1] == right[0] for left, right in pairwise(every))


def exchange_by_halving(part: Part) -> Rounds:
    """Sum a part by messages to one partner a round. The nodes of neighboring members follow each other."""
    num_rounds = len(part.members).bit_length() - 1
    num_pairs = len(part.members) - (1 << num_rounds)  # of host and guest: the first members
    me, total, length = part.place, part.total, part.total.numel()
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
    first, last = 0, 1 << num_rounds  # the chunks that this rank still holds of its nodes
    for number in range(num_rounds):
        middle, is_right = (first + last) // 2, position >> number & 1
        cut, partner = offset(middle) - offset(first), position ^ (1 << number)
        for index, (_, values) in enumerate(held):
            part.send(values[:cut] if is_right else values[cut:], member(partner), index)
        kept = [(node, values[cut:] if is_right else values[:cut]) for node, values in held]
        first, last = (middle, last) if is_right else (first, middle)
        group = partner >> number << number
        nodes = _nodes_of(part, member(group), member(group + (1 << number)))
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
        first, last = min(first, other[0]), max(last, other[1])
        yield part.round()
    if is_paired:
        part.send(total, me + 1, RESULT)
        yield part.round()


def _nodes_of(part: Part, first: int, last: int) -> list[Node]:
    """Return the nodes that the members [first, last) have after they have merged theirs."""
    from_left = next((nodes for nodes in part.nodes[first:last] if nodes), None)
    if from_left is None:
        return []
    from_right = next(part.nodes[place] for place in range(last - 1, first - 1, -1) if part.nodes[place])
    leaves = from_left[0][0], from_right[-1][1]
    return partials(*leaves, part.num_leaves) if part.exact else [leaves]
