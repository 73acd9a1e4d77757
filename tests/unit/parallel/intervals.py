"""The nodes of an interval of leaves, computed without merging: what `merged` is compared with."""

from samebits.parallel.tree import Node


def partials(first: int, last: int, num_leaves: int) -> list[Node]:
    """The fewest nodes that cover the leaves [first, last)."""
    nodes: list[Node] = []
    while first < last:
        size = 1
        # The largest block that starts here. The last block of the tree may be cut at the number of leaves.
        while first % (2 * size) == 0 and min(first + 2 * size, num_leaves) <= last and first + size < num_leaves:
            size *= 2
        nodes.append((first, min(first + size, num_leaves)))
        first += size
    return nodes
