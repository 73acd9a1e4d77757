"""The binary tree in which a step's micro-batches are summed. It depends on their number, not on the world.

Floating-point addition is not associative, so equal bits need the same brackets. The tree is balanced over the
micro-batch index: blocks of 2, 4, 8 ... leaves that start at a multiple of their size, the last one cut at the number
of leaves. A node is the half-open interval of the leaves that it sums. Six micro-batches, any number of ranks:

    (0,6)  = (0,4) + (4,6)
    (0,4)  = (0,2) + (2,4)            ((g0 + g1) + (g2 + g3)) + (g4 + g5)
    (0,2)  = g0 + g1    (2,4) = g2 + g3    (4,6) = g4 + g5

With two ranks, rank 0 has g0 g1 g2 and sends (0,2) and (2,3); rank 1 has g3 g4 g5 and sends (3,4) and (4,6).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Return whether two nodes, of leaves [first, last), are adjacent and have the same parent in the tree."""
    size = left[1] - left[0]
    return (
        left[1] == right[0]
        and size & (size - 1) == 0
        and left[0] % (2 * size) == 0
        and right[1] == min(left[0] + 2 * size, num_leaves)
    )


def push(
    stack: list[tuple[Node, T]], node: Node, value: T, num_leaves: int, add: Callable[[T, T], T]
) -> None:
    """Append a node to a list of adjacent nodes, and merge its last two as long as they are siblings.

    Args:
        stack: Adjacent nodes from left to right, each with its sum. Changed in place.
        add: (left, right) -> their sum; may write into `left`.
    """
    stack.append((node, value))
    while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], num_leaves):
        (left, left_value), (right, right_value) = stack[-2:]
        stack[-2:] = [((left[0], right[1]), add(left_value, right_value))]


def merged(nodes: Iterable[Node], num_leaves: int) -> list[Node]:
    """Return what is left of adjacent nodes, or of nodes in the order in which a rank sums them, without siblings."""
    stack: list[tuple[Node, None]] = []
    for node in nodes:
        push(stack, node, None, num_leaves, lambda left, right: None)
    return [node for node, _ in stack]


@lru_cache(64)
def rank_nodes(
    leaves: tuple[Sequence[int], ...], num_leaves: int, held: tuple[tuple[Node, ...], ...] = ()
) -> list[list[Node]]:
    """Return each rank's nodes after its last micro-batch. The list is kept for the next step: it must not be changed.

    Args:
        leaves: For each rank, the indices of its micro-batches, in the order in which it computes them.
        held: For each rank, the nodes that it starts with; empty: none.
    """
    before = held or ((),) * len(leaves)
    return [
        merged([*own, *((leaf, leaf + 1) for leaf in mine)], num_leaves)
        for own, mine in zip(before, leaves, strict=True)
    ]
