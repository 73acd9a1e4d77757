"""Division of a step's micro-batches by the speed of the ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import Division, divide, duration, part
from samebits.data.order import Order

TIMES = st.lists(st.floats(1e-4, 10), min_size=1, max_size=6).map(tuple)


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    machines: tuple[int, ...] = ()


@given(st.integers(1, 40), TIMES)
def test_each_micro_batch_has_one_rank_and_no_rank_is_left_out(num: int, times: tuple[float, ...]) -> None:
    shares = divide(num, times)
    assert [leaf for share in shares for leaf in range(*share)] == list(range(num))
    if num >= len(times):
        assert all(first < last for first, last in shares)
    else:
        assert shares == tuple(part(0, num, len(times), rank) for rank in range(len(times)))


@given(st.integers(3, 12), st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(tuple))
def test_no_other_division_ends_earlier(num: int, times: tuple[float, ...]) -> None:
    cuts = itertools.combinations(range(1, num), 2)
    best = min(duration([(0, first), (first, second), (second, num)], times) for first, second in cuts)
    assert duration(divide(num, times), times) == pytest.approx(best)


def test_a_rank_at_half_speed_gets_half_as_many() -> None:
    assert divide(12, (1.0, 2.0)) == ((0, 8), (8, 12))
    assert divide(12, (1.0, 1.0)) == ((0, 6), (6, 12))


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 6), TIMES, st.integers(0, 9))
def test_uneven_steps_have_each_sample_once_with_its_own_key(
    num_samples: int, global_batch: int, micro_batch: int, times: tuple[float, ...], start: int
) -> None:
    order, stop = Order(num_samples, global_batch, micro_batch), start + 5
    plans = [
        list(order.steps(_Place(rank, len(times)), start=start, stop=stop, division=Division(times)))
        for rank in range(len(times))
    ]
    for whole, *mine in zip(order.steps(_Place(0, 1), start=start, stop=stop), *plans, strict=True):
        found = [each for step in mine for each in step.micro_batches]
        assert [each.index for each in found] == list(range(whole.num_micro_batches))
        for each, expected in zip(found, whole.micro_batches, strict=True):
            assert np.array_equal(each.indices, expected.indices)
            assert np.array_equal(each.keys, expected.keys)
        assert {step.num_samples for step in mine} == {whole.num_samples}
        assert all(
            [*step.leaves[rank]] == [each.index for each in step.micro_batches] for rank, step in enumerate(mine)
        )
