"""The one shape in which a step's micro-batches are added up, whatever the world.

Floating-point addition is not associative, so the same bits need the same brackets. The shape is a balanced binary tree
over the micro-batch index: blocks of 2, 4, 8 ... leaves that start at a multiple of their size, the last one cut off
where the leaves end. A node is the half-open interval of the leaves that it sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Node = tuple[int, int]
T = TypeVar("T")


def are_siblings(left: Node, right: Node, num_leaves: int) -> bool:
    """Whether two neighbouring nodes have the same parent in the tree over `num_leaves` leaves."""
    size = left[1] - left[0]
    return (
        left[1] == right[0]
        and size & (size - 1) == 0
        and left[0] % (2 * size) == 0
        and right[1] == min(left[0] + 2 * size, num_leaves)
    )


def push(stack: list[tuple[Node, T]], node: Node, value: T, num_leaves: int, add: Callable[[T, T], T]) -> None:
    """Put a node at the end of a row of nodes, and merge from the right as long as the last two are siblings.

    Args:
        stack: The row so far, each node with its sum.
        node: Begins where the row ends.
        value: Its sum.
        num_leaves: Leaves of the whole tree.
        add: (left, right) -> their sum; may write into `left`.
    """
    stack.append((node, value))
    while len(stack) > 1 and are_siblings(stack[-2][0], stack[-1][0], num_leaves):
        (left, left_value), (right, right_value) = stack[-2:]
        stack[-2:] = [((left[0], right[1]), add(left_value, right_value))]


def partials(first: int, last: int, num_leaves: int) -> list[Node]:
    """The fewest nodes that cover the leaves [first, last): what is left in a process when it has added all it can."""
    stack: list[tuple[Node, None]] = []
    for leaf in range(first, last):
        push(stack, (leaf, leaf + 1), None, num_leaves, lambda left, right: None)
    return [node for node, _ in stack]
