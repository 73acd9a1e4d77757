from __future__ import annotations

import math

import pytest

from lockstep.report.rate import Rate
from lockstep.report.words import clock, duration, metric_name, metric_value


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.21, "4.2 s"), (9.97, "10 s"), (21.2, "21 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (math.inf, "-:--"), (8.2, "0:09"), (750, "12:30"), (7500, "2:05:00")]
)
def test_time_left_reads_like_a_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("top1", 0.98611, "98.61%"),
        ("loss", 0.11312, "0.113"),
        ("loss", 0.0, "0.000"),
        ("loss", 0.0000123, "1.230e-05"),
        ("loss", math.nan, "nan"),
        ("edit_distance", 2.5, "2.500"),
        ("mean_accuracy", 0.5, "50.00%"),
    ],
)
def test_a_share_is_shown_in_percent_and_all_else_as_a_number(name: str, value: float, text: str) -> None:
    assert metric_value(name, value) == text


def test_a_metric_has_a_readable_name() -> None:
    assert [metric_name(name) for name in ("top1", "top5", "edit_distance")] == ["top-1", "top-5", "edit distance"]


def test_the_rate_leaves_out_what_lies_between_the_steps() -> None:
    now = 0.0
    rate = Rate(clock=lambda: now)
    assert rate.samples_per_s == 0
    assert rate.seconds_for(100) is None
    for _ in range(4):
        now += 0.5
        rate.add(50)
    now += 1000
    rate.resume()
    now += 0.5
    rate.add(50)
    assert rate.samples_per_s == pytest.approx(100)
    assert rate.seconds_for(1000) == pytest.approx(10)


def test_the_rate_follows_the_last_seconds() -> None:
    now = 0.0
    rate = Rate(window_s=5, clock=lambda: now)
    for step in range(200):
        now += 0.1 if step < 100 else 0.2
        rate.add(10)
    assert rate.samples_per_s == pytest.approx(50)
