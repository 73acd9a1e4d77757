"""A loss that grows over many steps is noticed, and noise is not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.report.loss_trend import LossTrend, block_size, grows_from

LOSSES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(means=LOSSES)
def test_a_loss_that_falls_never_grows(means: list[float]) -> None:
    assert grows_from(sorted(means, reverse=True)) is None


@settings(max_examples=200, deadline=None)
@given(noise=st.lists(st.floats(0.81, 1.19), min_size=1, max_size=30), level=st.floats(0.001, 1000))
def test_noise_of_a_fifth_is_no_growth(noise: list[float], level: float) -> None:
    assert grows_from([level * each for each in noise]) is None


@settings(max_examples=200, deadline=None)
@given(means=LOSSES, power=st.integers(-20, 20))
def test_the_unit_of_the_loss_does_not_matter(means: list[float], power: int) -> None:
    assert grows_from([mean * 2.0**power for mean in means]) == grows_from(means)


@settings(max_examples=200, deadline=None)
@given(means=LOSSES, factor=st.floats(1.01, 100))
def test_a_single_high_block_is_no_growth_and_two_are(means: list[float], factor: float) -> None:
    high = (min(means) + max(means) * 0.5) * factor
    falling = sorted(means, reverse=True)
    assert grows_from([*falling, high]) is None
    assert grows_from([*falling, high, high]) == falling.index(min(falling))


def test_a_resumed_run_compares_with_the_loss_of_its_start() -> None:
    means = [0.01, 0.02, 0.03]
    assert grows_from(means) == 0
    assert grows_from(means, first=2.3) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_notice_names_the_steps_and_comes_once(bad: float) -> None:
    trend = LossTrend(40)
    trend.start(0, None)
    losses = [1.6, bad, 1.6, 1.6] + [1.4] * 4 + [20.0] * 4 + [750.0] * 28
    texts = [text for loss in losses if (text := trend.add(loss))]
    assert texts == ["the training loss grows: from 1.4 in steps 5-8 to 750 in steps 13-16"]


@given(num_steps=st.integers(1, 10**9))
def test_blocks_have_4_to_50_steps(num_steps: int) -> None:
    assert 4 <= block_size(num_steps) <= 50
