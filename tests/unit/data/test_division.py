"""Division of a step's micro-batches among ranks, as they are dealt after a loss within the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import Division
from samebits.data.order import Order

NUM_RANKS = 4


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    machines: tuple[int, ...] = ()


@settings(max_examples=40)
@given(st.lists(st.integers(0, NUM_RANKS - 1), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 9))
def test_a_dealt_step_has_each_sample_once_with_its_own_key(owners: list[int], micro_batch: int, number: int) -> None:
    size = len(owners) * micro_batch
    order = Order(2 * size, size, micro_batch)
    dealt = tuple(tuple(leaf for leaf, owner in enumerate(owners) if owner == rank) for rank in range(NUM_RANKS))
    (whole,) = order.steps(_Place(0, 1), start=number, stop=number + 1)
    found = {}
    for rank in range(NUM_RANKS):
        (step,) = order.steps(_Place(rank, NUM_RANKS), start=number, stop=number + 1, division=Division(dealt=dealt))
        assert step.num_samples == whole.num_samples
        assert tuple(each.index for each in step.micro_batches) == dealt[rank]
        found |= {each.index: each for each in step.micro_batches}
    assert sorted(found) == list(range(whole.num_micro_batches))
    for expected in whole.micro_batches:
        assert np.array_equal(found[expected.index].indices, expected.indices)
        assert np.array_equal(found[expected.index].keys, expected.keys)
