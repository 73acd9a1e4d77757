"""All-reduce of a bucket in a large world: recursive halving, then doubling, in tree order.

`TreeAllReduce` sends a message to each other rank. Here a rank has one partner a round, so with W ranks it sends
2 log2(W) messages for each of its nodes, of as many bytes in total. Eight ranks, seen from rank 0:

    start         exchange halves with rank 1       keep the first half of the nodes of ranks 0-1
    middle        exchange quarters with rank 2     keep the first quarter of the nodes of ranks 0-3
                  exchange eighths with rank 4      the first eighth is complete
    finish        receive the other eighth of a quarter from rank 4, the other quarter from 2, the other half from 1

Neighbors hold neighboring micro-batches, so what a group of ranks holds is an interval of leaves, summed in the
brackets of `tree.py`. With W between two powers of two, some ranks (guests) first give their nodes to their left
neighbor (host), and receive the complete sum from it at the end.

Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH (2005).
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from samebits.cluster.world import World
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.tags import RESULT
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
from samebits.parallel.tree import Node, partials, push

# One message to each rank at the same time is faster than one round after another in a small world, and where the
# messages are large: it then takes fewer bytes if the number of ranks is no power of two.
DIRECT_SIZE = 16
SMALL_MESSAGE_BYTES = 64 * 1024


def make_all_reduce(bucket: Bucket, world: World, nodes: list[list[Node]], tag: int) -> TreeAllReduce:
    """Return the all-reduce of a bucket in one step that suits the size of the world.

    Args:
        bucket: Its `nodes` are this rank's partial sums.
    """
    is_halved = is_in_rounds(world.size, bucket.length * bucket.dtype.itemsize) and follow_each_other(nodes)
    return (HalvingAllReduce if is_halved else TreeAllReduce)(bucket, world, nodes, tag)


def is_in_rounds(size: int, num_bytes: int) -> bool:
    """Return whether a bucket of `num_bytes` is reduced in rounds in a world of this size."""
    return size > DIRECT_SIZE and num_bytes < size * SMALL_MESSAGE_BYTES


def follow_each_other(nodes: Sequence[list[Node]]) -> bool:
    """Return whether the nodes are in the order of the ranks. They are not after a loss within a step."""
    every = [node for own in nodes for node in own]
    return all(left[1] == right[0] for left, right in pairwise(every))


class HalvingAllReduce(TreeAllReduce):
    """The all-reduce of one bucket in one step, with the methods of a `TreeAllReduce`.

    Args:
        bucket: Its `nodes` are this rank's partial sums. `finish` sets its `result`.
        nodes: For each rank, its nodes. Those of neighboring ranks follow each other.
    """

    def __init__(self, bucket: Bucket, world: World, nodes: list[list[Node]], tag: int) -> None:
        super().__init__(bucket, world, nodes, tag)
        self._num_rounds = world.size.bit_length() - 1
        self._num_pairs = world.size - (1 << self._num_rounds)  # of host and guest: the first ranks
        rank, is_paired = world.rank, world.rank < 2 * self._num_pairs
        self._host = rank - 1 if is_paired and rank % 2 else None
        self._guest = rank + 1 if is_paired and rank % 2 == 0 else None
        self._place = rank // 2 if is_paired else rank - self._num_pairs
        self._chunks = (0, 1 << self._num_rounds)  # that this rank still holds of its nodes
        self._chunk_size = -(-bucket.length // (1 << self._num_rounds))
        self._held: list[tuple[Node, Tensor]] = []
        self._received: list[tuple[Node, Tensor]] = []
        self._free: Tensor | None = None

    def start(self) -> None:
        """Send this rank's nodes to its host, or half of each to its first partner."""
        nodes = [node for node, _ in self._bucket.nodes]
        self._held = list(zip(nodes, self._own_values(), strict=True))
        if self._host is not None:
            for index, (_, values) in enumerate(self._held):
                self._send(values, self._host, index)
        elif self._guest is not None:
            self._receive_nodes(self._nodes[self._guest], self._guest, self._bucket.length)
        else:
            self._halve(0)
        self._post()

    def middle(self) -> None:
        """Halve what this rank holds until it is one chunk, whose sum is then complete."""
        self._wait()
        self.has_added = True
        if self._host is not None:
            self._receive(self._total, self._host, RESULT)
            self._post()
            return
        self._merge()
        for number in range(0 if self._guest is not None else 1, self._num_rounds):
            self._halve(number)
            self._post()
            self._wait()
            self._merge()
        ((_, total),) = self._held
        destination = self._part(*self._chunks)
        # The sum may lie in the memory of a message, by the order in which nodes were merged.
        if total.data_ptr() != destination.data_ptr():
            destination.copy_(total)

    def finish(self) -> None:
        """Receive the sums of the other chunks, and set the bucket's `result`."""
        if self._host is None:
            for number in reversed(range(self._num_rounds)):
                self._double(number)
            if self._guest is not None:
                self._send(self._total, self._guest, RESULT)
                self._post()
        super().finish()

    def _halve(self, number: int) -> None:
        """Send half of each node that this rank holds, and receive the other half of those of its partner."""
        first, last = self._chunks
        middle, is_right = (first + last) // 2, self._place >> number & 1
        cut = self._offset(middle) - self._offset(first)
        partner = self._place ^ (1 << number)
        self._chunks = (middle, last) if is_right else (first, middle)
        for index, (node, values) in enumerate(self._held):
            kept, given = (values[cut:], values[:cut]) if is_right else (values[:cut], values[cut:])
            self._held[index] = node, kept
            self._send(given, self._rank(partner), index)
        group = partner >> number << number
        nodes = self._nodes_of(self._rank(group), self._rank(group + (1 << number)))
        self._receive_nodes(nodes, self._rank(partner), self._offset(self._chunks[1]) - self._offset(self._chunks[0]))

    def _double(self, number: int) -> None:
        """Exchange the complete sums of two neighboring runs of chunks."""
        (first, last), is_right = self._chunks, self._place >> number & 1
        length, partner = last - first, self._rank(self._place ^ (1 << number))
        other = (first - length, first) if is_right else (last, last + length)
        self._send(self._part(first, last), partner, RESULT)
        self._receive(self._part(*other), partner, RESULT)
        self._chunks = min(first, other[0]), max(last, other[1])
        self._post()
        self._wait()

    def _merge(self) -> None:
        """Add what was received to what this rank holds."""
        stack: list[tuple[Node, Tensor]] = []
        # The partner's nodes may be to the left or to the right of this rank's.
        for node, values in sorted([*self._held, *self._received], key=lambda entry: entry[0]):
            if self._bucket.exact or not stack:
                push(stack, node, values, self._num_leaves, Tensor.add_)
            else:  # fast mode: a single node for each group
                stack[0] = (stack[0][0][0], node[1]), stack[0][1].add_(values)
        self._held, self._received = stack, []

    def _receive_nodes(self, nodes: Sequence[Node], peer: int, length: int) -> None:
        for index, node in enumerate(nodes):
            values = self._take_memory(length)
            self._receive(values, peer, index)
            self._received.append((node, values))

    def _take_memory(self, length: int) -> Tensor:
        """Return memory for a message, (length,): each round takes half as much as the one before."""
        if self._free is None or self._free.numel() < length:
            self._free = self._bucket.borrow(self._bucket.length, on_host=self._is_via_host)
        taken, self._free = self._free[:length], self._free[length:]
        return taken

    def _nodes_of(self, first: int, last: int) -> list[Node]:
        """Return the nodes that the ranks [first, last) have after they have merged theirs."""
        from_left = next((nodes for nodes in self._nodes[first:last] if nodes), None)
        if from_left is None:
            return []
        from_right = next(self._nodes[rank] for rank in range(last - 1, first - 1, -1) if self._nodes[rank])
        leaves = from_left[0][0], from_right[-1][1]
        return partials(*leaves, self._num_leaves) if self._bucket.exact else [leaves]

    def _rank(self, place: int) -> int:
        return place + min(place, self._num_pairs)

    def _offset(self, chunk: int) -> int:
        return min(chunk * self._chunk_size, self._bucket.length)

    def _part(self, first: int, last: int) -> Tensor:
        """Return chunks [first, last) of the total."""
        return self._total[self._offset(first) : self._offset(last)]
