"""Synthetic and recorded traces of spot machines, and the goodput of a replay."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.spot_trace import (
    Change,
    Recording,
    batches,
    goodput,
    intervals,
    make_recorded_trace,
    make_trace,
    read_recording,
)


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


def test_the_recorded_trace_has_the_availability_of_its_source(repo: Path) -> None:
    recording = read_recording(repo / "benchmarks" / "spot_p3.csv")
    assert (max(recording.machines), min(recording.machines)) == (32, 10)
    assert recording.num_changes() == 159 + 167
    assert recording.mean_change_s() == pytest.approx(125.5, abs=0.1)
    scaled = recording.scale(4)
    trace, factor = make_recorded_trace(recording, 1, 4, 40_920 / scaled.mean_change_s() * 20.0, 20.0, 0.0)
    assert factor == pytest.approx(scaled.mean_change_s() / 20.0)
    seconds = 40_920 / factor
    share = sum(length * up for length, up in intervals(trace, seconds)) / seconds / 4
    assert share == pytest.approx(0.75, abs=0.02)


@given(start_s=st.floats(0.0, 300.0), slots=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_part_of_a_recording_has_its_numbers_of_machines(start_s: float, slots: int, seed: int) -> None:
    recording = Recording((0.0, 100.0, 200.0, 350.0, 500.0), (5, 0, 4, 1, 3))
    scaled = recording.scale(slots)
    if not scaled.num_changes():
        return
    trace, factor = make_recorded_trace(recording, seed, slots, 10.0, scaled.mean_change_s() / 20.0, start_s)
    assert factor == pytest.approx(20.0)
    expected = [each for time_s, each in zip(scaled.times_s, scaled.machines, strict=True) if time_s <= start_s][-1:]
    expected += [
        each for time_s, each in zip(scaled.times_s, scaled.machines, strict=True) if start_s < time_s < start_s + 200
    ]
    up: set[int] = set()
    found = []
    for _, changes in batches(trace):
        for change in changes:
            assert (change.slot in up) != change.is_up
            up ^= {change.slot}
        found.append(len(up))
    assert found == [each for each, before in zip(expected, [0, *expected], strict=False) if each != before]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("0,1\n", "header"), ("seconds,machines\n0,1\n0,2\n", "ascend"), ("seconds,machines\n", "change")],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_recording(tmp_path / "trace.csv")


def test_a_part_that_the_recording_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="need"):
        make_recorded_trace(Recording((0.0, 100.0), (1, 2)), 1, 2, 60.0, 50.0, 50.0)
