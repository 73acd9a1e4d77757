"""When `stop_early` ends a run."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.config.interval import parse_steps
from samebits.config.sections import StopEarlyConfig
from samebits.metrics.early_stop import Patience, last_step, metric_of

MONITOR = ("top1", "max")
VALUES = st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), max_size=20)


def test_a_run_ends_when_as_many_validations_as_the_patience_are_no_better() -> None:
    config = StopEarlyConfig(patience=2)
    values = [0.5, 0.6, 0.6, 0.59, 0.7]
    assert last_step([(step, {"top1": value}) for step, value in enumerate(values)], config, MONITOR) == 3


def test_a_small_improvement_does_not_count() -> None:
    values = [0.5, 0.505, 0.509, 0.9]
    steps = [(step, {"top1": value}) for step, value in enumerate(values)]
    assert last_step(steps, StopEarlyConfig(patience=2, min_delta=0.01), MONITOR) == 2
    assert last_step(steps, StopEarlyConfig(patience=2), MONITOR) is None


def test_another_metric_has_a_direction_of_its_own() -> None:
    config = StopEarlyConfig(patience=1, metric="loss", better="min")
    assert metric_of(config, MONITOR) == ("loss", -1.0)
    steps = [(1, {"loss": 2.0}), (2, {"loss": 1.0}), (3, {"loss": 1.5})]
    assert last_step(steps, config, MONITOR) == 3


@given(values=VALUES, patience=st.integers(1, 5))
def test_the_rule_is_the_length_of_the_last_stretch_without_a_new_best(values: list[float], patience: int) -> None:
    config = StopEarlyConfig(patience=patience)
    now, expected = Patience(), None
    for step, value in enumerate(values):
        now = now.after(value, 1.0, config)
        seen = [each for each in values[: step + 1] if not math.isnan(each)]
        newest = next((index for index, each in enumerate(values) if seen and each == max(seen)), -1)
        assert now.num_stale == step - newest
        if expected is None and now.is_over(config):
            expected = step
    recorded = [(step, {"top1": None if math.isnan(value) else value}) for step, value in enumerate(values)]
    assert last_step(recorded, config, MONITOR) == expected


@pytest.mark.parametrize("text", ["3", "3:3", "4:3", "a:b", "-1:2", "1:2:3"])
def test_a_range_of_steps_has_a_first_step_and_one_after_the_last(text: str) -> None:
    with pytest.raises(ValueError, match="10:13"):
        parse_steps(text)
    assert parse_steps("10:13") == (10, 13)
