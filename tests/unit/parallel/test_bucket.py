"""The tree's brackets, and the gradient buckets whose leaves are filled one after another or by turns."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits.data.division import part
from samebits.parallel.bucket import Bucket, Flat, Leaf
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


SHAPES = ((3,), (2, 5), (20000,))
Gradients = list[dict[int, Tensor]]  # of each leaf, by index of the parameter


def gradients_of(num_leaves: int, seed: int) -> Gradients:
    """Of some of the parameters in each leaf; a third of the values is 0 or -0, a third so small that halves round."""
    generator = torch.Generator().manual_seed(seed)

    def gradient(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        kinds = torch.rand(shape, generator=generator)
        smallest = (values * 4).round() * 2.0**-149
        return torch.where(kinds < 0.3, values * 0.0, torch.where(kinds < 0.6, smallest, values))

    made = [dict(enumerate(map(gradient, SHAPES))) for _ in range(num_leaves)]
    return [{at: each for at, each in leaf.items() if torch.rand((), generator=generator) < 0.8} for leaf in made]


def bucket_of(together: bool = False, leaves: Sequence[int] = range(20)) -> Bucket:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    bucket = Bucket(parameters, 2, 1, torch.device("cpu"))
    bucket.moves_together = together
    bucket.start_step(leaves)
    return bucket


def take(bucket: Bucket, leaf: Leaf, index: int, gradient: Tensor) -> None:
    bucket.parameters[index].grad = gradient.clone()
    bucket.take(leaf, index, 0.5)


def end(bucket: Bucket, leaf: Leaf, num_leaves: int) -> None:
    if bucket.tail_length:
        leaf.put_tail(torch.tensor([1.0, leaf.index]))
    bucket.add_given(leaf, 0.5)
    bucket.end_leaf(leaf, num_leaves)


def fill(bucket: Bucket, gradients: Gradients, leaves: Sequence[int] | None = None) -> Bucket:
    """One leaf after another."""
    for number in range(len(gradients)) if leaves is None else leaves:
        leaf = bucket.start_leaf(number, len(gradients))
        for index, gradient in gradients[number].items():
            take(bucket, leaf, index, gradient)
        end(bucket, leaf, len(gradients))
    return bucket


def fill_as_own_loops_do(bucket: Bucket, gradients: Gradients, leaves: Sequence[int] | None = None) -> Bucket:
    for number in range(len(gradients)) if leaves is None else leaves:
        leaf = bucket.start_leaf(number, len(gradients))
        for index, gradient in gradients[number].items():
            bucket.parameters[index].grad = gradient
            bucket.give(leaf, index, 0.3)
        bucket.add_given(leaf, 0.3)
        end(bucket, leaf, len(gradients))
    return bucket


def fill_by_turns(bucket: Bucket, gradients: Gradients, chance: random.Random) -> Bucket:
    """All leaves at the same time, in any order."""
    leaves = [bucket.start_leaf(number, len(gradients)) for number in range(len(gradients))]
    places = [(number, index) for number, own in enumerate(gradients) for index in [*own, None]]
    chance.shuffle(places)
    left = [len(own) + 1 for own in gradients]
    for number, index in places:
        if index is not None:
            take(bucket, leaves[number], index, gradients[number][index])
        left[number] -= 1
        if left[number] == 0:
            end(bucket, leaves[number], len(gradients))
        # Memory that an open leaf still adds to is no node: a run that goes on without a lost rank keeps the nodes.
        written = {id(leaf.flat) for leaf in leaves if not leaf.is_done}
        assert not any(id(flat) in written for _, flat in bucket.nodes)
    return bucket


def added_up(fill: Callable[..., Bucket], gradients: Gradients) -> Bucket:
    """As on ranks with one micro-batch each: every leaf in a bucket of its own, then added up."""
    filled = [fill(bucket_of(leaves=[leaf]), gradients, [leaf]) for leaf in range(len(gradients))]
    stack: list[tuple[Node, Flat]] = []
    for leaf, bucket in enumerate(filled):
        push(stack, (leaf, leaf + 1), bucket.nodes[0][1], len(gradients), filled[0]._merge)
    filled[0].nodes = stack
    return filled[0]


def bits(bucket: Bucket) -> list[bytes]:
    (_, flat), = bucket.nodes  # fmt: skip
    return [view.contiguous().view(torch.uint8).numpy().tobytes() for view in [*flat.views, flat.tail] if len(view)]


@given(num_leaves=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_the_sum_has_the_bits_of_the_tree_in_any_order_of_gradients(num_leaves: int, seed: int) -> None:
    gradients = gradients_of(num_leaves, seed)
    expected = bits(added_up(fill, gradients))
    for together in (False, True):  # together: as on a GPU
        assert bits(fill(bucket_of(together=together), gradients)) == expected
        by_turns = fill_by_turns(bucket_of(together=together), gradients, random.Random(seed))
        assert bits(by_turns) == expected


@given(num_leaves=st.integers(1, 9), seed=st.integers(0, 1 << 30))
def test_the_sum_of_an_own_loop_has_the_bits_of_the_tree(num_leaves: int, seed: int) -> None:
    gradients = gradients_of(num_leaves, seed)
    expected = bits(added_up(fill_as_own_loops_do, gradients))
    assert bits(fill_as_own_loops_do(bucket_of(), gradients)) == expected


@pytest.mark.parametrize("num_leaves", [2, 4, 8])
def test_two_siblings_by_turns_share_memory(num_leaves: int) -> None:
    bucket = bucket_of()
    leaves = [bucket.start_leaf(number, num_leaves) for number in range(num_leaves)]
    assert len({id(leaf.flat) for leaf in leaves}) == num_leaves // 2


def test_nodes_in_the_middle_of_a_step_are_those_of_the_tree() -> None:
    gradients = gradients_of(5, 1)
    bucket = bucket_of()
    leaves = [bucket.start_leaf(number, 5) for number in range(5)]
    seen = []
    for number in (1, 0, 2, 3, 4):
        for index, gradient in gradients[number].items():
            take(bucket, leaves[number], index, gradient)
        end(bucket, leaves[number], 5)
        seen.append([node for node, _ in bucket.nodes])
    assert seen == [[], partials(0, 2, 5), partials(0, 2, 5), partials(0, 4, 5), [(0, 5)]]
