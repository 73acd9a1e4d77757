"""Gradient buckets, whose leaves are filled one after another or by turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits.parallel.bucket import Bucket, Flat, Leaf
from samebits.parallel.tree import Node, push
from tests.unit.parallel.intervals import partials

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
