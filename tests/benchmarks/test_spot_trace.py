"""Synthetic traces of spot machines, and the goodput of a replay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spot_trace import Change, goodput, intervals, make_trace


@given(seed=st.integers(0, 10**6), slots=st.integers(1, 6), availability=st.floats(0.3, 0.9))
def test_machines_change_in_turns_and_one_is_always_up(seed: int, slots: int, availability: float) -> None:
    trace = make_trace(seed, slots, 600.0, availability, 5.0)
    up: set[int] = set()
    for change in trace:
        assert (change.slot in up) != change.is_up
        up ^= {change.slot}
        assert up
    assert [change.at_s for change in trace] == sorted(change.at_s for change in trace)
    assert sum(length for length, _ in intervals(trace, 600.0)) == pytest.approx(600.0)


def test_a_long_trace_has_the_given_availability_and_rate_of_changes() -> None:
    trace = make_trace(1, 8, 1e5, 0.7, 10.0)
    shares = [length * up for length, up in intervals(trace, 1e5)]
    assert sum(shares) / 8e5 == pytest.approx(0.7, abs=0.05)
    assert 1e5 / len(trace) == pytest.approx(10.0, rel=0.1)


def test_goodput_is_one_if_nothing_is_lost() -> None:
    trace = [Change(0.0, 0, True), Change(0.0, 1, True), Change(10.0, 1, False)]
    assert intervals(trace, 30.0) == [(10.0, 2), (20.0, 1)]
    assert goodput(10 * 200 + 20 * 100, trace, 30.0, lambda size: 100.0 * size) == 1.0
    assert goodput(10 * 200 + 20 * 50, trace, 30.0, lambda size: 100.0 * size) == 0.75
