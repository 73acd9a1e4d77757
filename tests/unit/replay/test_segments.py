"""Segments: every step is in one, anyone with the root chooses the same ones, and what escapes is stated rightly."""

import hashlib
import time
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tampered_runs import report_audits
from samebits.replay.segments import Segment, choose, covering, cut, describe, escape_probability
from samebits.replay.verify import Verdict

STARTS = st.lists(st.integers(-5, 300), max_size=20)


def root(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


@given(starts=STARTS, num_steps=st.integers(1, 250))
def test_each_step_is_in_one_segment(starts: list[int], num_steps: int) -> None:
    segments = cut(starts, num_steps)
    assert [step for each in segments for step in range(each.start, each.stop)] == list(range(num_steps))
    assert {each.start for each in segments} <= {0, *starts}


@given(starts=STARTS, num_steps=st.integers(1, 250), share=st.floats(0.001, 1), seed=st.text(max_size=4))
def test_the_chosen_segments_just_cover_the_share(starts: list[int], num_steps: int, share: float, seed: str) -> None:
    segments = cut(starts, num_steps)
    chosen = choose(segments, share, seed)
    assert chosen == choose(list(reversed(segments)), share, seed) == sorted(set(chosen))
    assert set(chosen) <= set(segments)
    assert chosen[-1] == segments[-1]
    others = chosen[:-1]
    goal = share * segments[-1].start  # of the steps before it
    covered = sum(each.num_steps for each in others)
    assert covered >= goal
    assert not others or any(covered - each.num_steps < goal for each in others)


def test_all_steps_are_chosen_for_a_share_of_one_whatever_the_rounding() -> None:
    for num_steps in range(1, 200):
        assert choose(cut(range(0, num_steps, 3), num_steps), 1.0, "") == cut(range(0, num_steps, 3), num_steps)


def test_another_root_or_challenge_chooses_others() -> None:
    segments = cut(range(0, 1000, 10), 1000)
    assert len({tuple(choose(segments, 0.05, root(number))) for number in range(20)}) == 20
    assert choose(segments, 0.05, root(0)) != choose(segments, 0.05, f"{root(0)} mine")


def test_each_segment_is_chosen_equally_often() -> None:
    segments = cut(range(0, 110, 10), 110)
    counts = dict.fromkeys(segments, 0)
    for number in range(2000):
        for each in choose(segments, 0.3, root(number)):
            counts[each] += 1
    assert counts.pop(segments[-1]) == 2000
    assert all(abs(count - 600) < 5 * (2000 * 0.3 * 0.7) ** 0.5 for count in counts.values())


@pytest.mark.parametrize("num_changed", [1, 2, 5, 20])
def test_changes_escape_as_often_as_stated_in_a_thousand_audits(num_changed: int) -> None:
    segments = cut(range(0, 410, 10), 410)  # 40, and the last
    changed = set(segments[7 : 7 + num_changed])
    escaped = sum(not changed & set(choose(segments, 0.1, root(number))) for number in range(1000))
    expected = escape_probability(40, 4, num_changed)
    assert abs(escaped / 1000 - expected) < 4 * (expected * (1 - expected) / 1000) ** 0.5


@pytest.mark.parametrize(("num_changed", "is_last_changed"), [(1, False), (1, True), (2, True)])
def test_the_audits_of_tampered_runs_leave_out_the_segment_that_is_always_chosen(
    num_changed: int, is_last_changed: bool
) -> None:
    segments = cut(range(0, 20, 4), 20)  # as those of the benchmark
    verdicts = []
    for first in range(4):
        changed = {segments[(first + each) % 4] for each in range(num_changed)}
        changed |= {segments[-1]} if is_last_changed else set()
        kept = [each for each in segments if each not in changed]
        verdicts.append(Verdict(root(first), 20, segments, chosen=segments, replayed=kept))
    rows: list[tuple[str, str, str]] = []
    assert report_audits(verdicts, rows), rows


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_the_probability_is_that_of_drawing_without_replacement(total: int, replayed: int, changed: int) -> None:
    replayed, expected = min(replayed, total), min(changed, total)
    exact = Fraction(comb(total - expected, replayed), comb(total, replayed))
    assert escape_probability(total, replayed, changed) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)


def test_a_run_of_millions_of_segments_takes_no_time() -> None:
    started = time.process_time()
    assert escape_probability(3_000_000, 30_000, 300_000) < 1e-300
    assert escape_probability(3_000_000, 30_000, 1) == pytest.approx(0.99)
    assert time.process_time() - started < 2


@given(starts=STARTS, num_steps=st.integers(1, 250), data=st.data())
def test_the_steps_of_a_user_are_replayed_from_a_point(starts: list[int], num_steps: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_steps - 1))
    stop = data.draw(st.integers(first + 1, num_steps))
    segments = cut(starts, num_steps)
    covered = covering(segments, first, stop)
    steps = {step for each in covered for step in range(each.start, each.stop)}
    assert steps >= set(range(first, stop))
    assert max(steps) == stop - 1
    assert {each.start for each in covered} <= {each.start for each in segments}


def test_neighbors_are_described_as_one_range() -> None:
    segments = [Segment(0, 5), Segment(5, 9), Segment(1200, 1300)]
    assert describe(segments) == "steps 0-8, 1,200-1,299"
    many = [Segment(10 * number, 10 * number + 1) for number in range(7)]
    assert describe(many) == "steps 0-0, 10-10, 20-20, 30-30, 40-40 and 2 more ranges"
