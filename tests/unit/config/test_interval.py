"""Intervals are due at the right steps or after the right time."""

import pytest

from samebits.config.interval import parse_fraction, parse_interval


@pytest.mark.parametrize(
    ("text", "due"), [("3 steps", [3, 6, 9]), ("1 epoch", [4, 8]), ("2 epochs", [8]), ("1 step", list(range(1, 10)))]
)
def test_an_interval_of_steps_or_epochs_follows_from_the_step_alone(text: str, due: list[int]) -> None:
    interval = parse_interval(text)
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=0.0)] == due
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=1e6)] == due


def test_an_interval_of_seconds_follows_from_the_time_alone() -> None:
    interval = parse_interval("5min")
    assert not interval.is_due(300, 1, elapsed_s=299.9)
    assert interval.is_due(7, 1000, elapsed_s=300.0)


@pytest.mark.parametrize(("text", "value"), [("1/50", 0.02), ("0.25", 0.25), (" 1/1 ", 1.0), ("3/4", 0.75), ("1", 1.0)])
def test_a_fraction_is_read(text: str, value: float) -> None:
    assert parse_fraction(text) == value


@pytest.mark.parametrize("text", ["", "1/0", "0", "0/5", "3/2", "-1/5", "a/b", "1/5/5", "1e-3", "nan"])
def test_what_is_no_fraction_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be"):
        parse_fraction(text)
