import math

import pytest

from samebits.report.format import block, clock, duration, metric_name, metric_value, metric_width
from samebits.report.speed import Rate


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
        ("top1", 0.98611, "98.61%"), ("loss", 1234.5678, "1235"), ("loss", 2.302585, "2.303"),
        ("loss", 0.11312, "0.1131"), ("loss", 0.009902, "0.009902"), ("loss", 0.0001, "0.0001000"),
        ("loss", 0.0, "0.000"), ("loss", 0.0000123, "1.230e-05"), ("loss", -0.25, "-0.2500"),
        ("loss", 123456.0, "1.235e+05"), ("loss", math.nan, "nan"), ("AP", 0.009902, "0.010"), ("AP", 1.0, "1.000"),
        ("AP", 0.00042, "0.0004"), ("AP", 0.0, "0.000"), ("APL", -1.0, "none"), ("correlation", -1.0, "-1.000"),
        ("squared_error", 0.0000123, "1.2e-05"), ("edit_distance", 2.5, "2.500"), ("mean_accuracy", 0.5, "50.00%"),
    ],
)  # fmt: skip
def test_a_share_is_shown_in_percent_and_all_else_as_a_number(name: str, value: float, text: str) -> None:
    assert metric_value(name, value) == text


@pytest.mark.parametrize("name", ["loss", "AP", "top1"])
def test_no_figure_below_10_000_is_wider_than_its_column(name: str) -> None:
    values = [10.0**power * digits for power in range(-9, 4) for digits in (1, 1.2345678, 9.99)]
    values = [value for value in values if name == "loss" or 0.0001 <= value <= 1] + [0.0]
    assert max(len(metric_value(name, value)) for value in values) == metric_width(name)


def test_long_rows_are_wrapped_at_80_columns_and_short_ones_are_as_they_were() -> None:
    prose, entries = "so many words " * 12, f"short  one\n{'a longer one ' * 8}\nlast"
    rows = {"sums": prose, "other shape": entries, "compute": "fp32,  two blanks", "gradients": ""}
    head, *lines = block("head", rows).splitlines()
    assert 75 < max(map(len, lines)) <= 80
    assert head == "head"
    texts = [line[15:] for line in lines]
    assert texts[-1] == "fp32,  two blanks"
    assert " ".join(texts[:-5]).split() == prose.split()
    first, second, third, fourth = texts[-5:-1]
    assert (first, second[:8], third[:4], fourth) == ("short  one", "a longer", "  a ", "last")


def test_a_word_that_is_too_long_is_left_whole() -> None:
    assert block("", {"file": f"in {'x' * 90}"}).splitlines()[1:] == ["  file  in", f"        {'x' * 90}"]


def test_what_is_there_to_be_copied_is_in_one_line() -> None:
    rows = {"next": f"samebits eval {'x' * 90}", "data": "word " * 30}
    assert block("", rows, whole=["next"]).splitlines()[1] == f"  next  {rows['next']}"


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
