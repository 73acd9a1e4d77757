"""The tree's brackets, written out as text: the same whatever the world."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import part
from samebits.parallel.tree import Node, are_siblings, push
from tests.unit.parallel.intervals import partials


def bracket(left: str, right: str) -> str:
    return f"({left} {right})"


def whole(first: int, last: int) -> str:
    """The brackets that the documentation describes: split at the largest power of two below the length."""
    if last - first == 1:
        return str(first)
    size = 1 << (last - first - 1).bit_length() - 1
    return bracket(whole(first, first + size), whole(first + size, last))


def held(first: int, last: int, num_leaves: int) -> list[tuple[Node, str]]:
    """What a process has after running the leaves [first, last) in turn."""
    stack: list[tuple[Node, str]] = []
    for leaf in range(first, last):
        push(stack, (leaf, leaf + 1), str(leaf), num_leaves, bracket)
    return stack


@pytest.mark.parametrize("world", range(1, 10))
def test_partial_sums_of_any_world_merge_to_one_root_with_the_same_brackets(world: int) -> None:
    for num_leaves in range(1, 41):
        root: list[tuple[Node, str]] = []
        for rank in range(world):
            for node, text in held(*part(0, num_leaves, world, rank), num_leaves):
                push(root, node, text, num_leaves, bracket)
        assert root == [((0, num_leaves), whole(0, num_leaves))]


@settings(max_examples=300, deadline=None)
@given(num_leaves=st.integers(1, 300), data=st.data())
def test_any_cut_between_processes_merges_to_the_same_brackets(num_leaves: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=6)))
    root: list[tuple[Node, str]] = []
    for first, last in zip([0, *cuts], [*cuts, num_leaves], strict=True):
        for node, text in held(first, last, num_leaves):
            push(root, node, text, num_leaves, bracket)
    assert root == [((0, num_leaves), whole(0, num_leaves))]


@settings(max_examples=300, deadline=None)
@given(num_leaves=st.integers(1, 2000), data=st.data())
def test_a_process_is_left_with_few_nodes_that_all_can_foretell(num_leaves: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_leaves))
    last = data.draw(st.integers(first, num_leaves))
    nodes = partials(first, last, num_leaves)
    assert nodes == [node for node, _ in held(first, last, num_leaves)]
    assert [leaf for start, stop in nodes for leaf in range(start, stop)] == list(range(first, last))
    # Places above 62 would collide with the tag of the second round.
    assert len(nodes) <= 2 * num_leaves.bit_length()


def test_brackets_of_small_trees_are_as_drawn() -> None:
    assert whole(0, 3) == "((0 1) 2)"
    assert whole(0, 6) == "(((0 1) (2 3)) (4 5))"
    assert held(2, 6, 8) == [((2, 4), "(2 3)"), ((4, 6), "(4 5)")]
    assert held(1, 3, 3) == [((1, 2), "1"), ((2, 3), "2")]


@pytest.mark.parametrize(
    ("left", "right", "num_leaves", "answer"),
    [
        ((0, 1), (1, 2), 8, True),
        ((1, 2), (2, 3), 8, False),  # neighbors with different parents
        ((2, 4), (4, 6), 8, False),
        ((0, 4), (4, 6), 6, True),  # cut off where the leaves end
        ((0, 4), (4, 6), 8, False),  # not complete yet
        ((0, 2), (3, 4), 4, False),  # not neighbors
        ((0, 3), (3, 4), 4, False),  # not a block
        ((4, 6), (6, 7), 7, True),
        ((0, 8), (8, 9), 9, True),
    ],
)
def test_siblings_have_the_same_parent(left: Node, right: Node, num_leaves: int, answer: bool) -> None:
    assert are_siblings(left, right, num_leaves) is answer
