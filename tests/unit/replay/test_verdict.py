"""Which segments of a run are replayed, and what a verdict says."""

import hashlib
import json
import time
from dataclasses import replace
from fractions import Fraction
from math import comb
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.tampered_runs import report_audits
from samebits.replay.segments import Difference, Segment, choose, covering, cut, describe, escape_probability
from samebits.replay.verify import Verdict, lines

SEGMENTS = cut(range(0, 100, 10), 100)
CHOSEN = SEGMENTS[2:6]


def verdict(**changes: Any) -> Verdict:
    whole = Verdict("r" * 64, 100, SEGMENTS, CHOSEN, replayed=CHOSEN, seconds=1.0)
    return replace(whole, **changes)


def test_steps_that_were_not_replayed_leave_a_verdict_incomplete() -> None:
    missing = verdict(replayed=[*CHOSEN[:2], *CHOSEN[3:]])
    assert not missing.is_verified
    assert lines(missing)[-1] == "result     incomplete: steps 40-49 were not replayed"


def test_a_difference_is_reported_with_both_values() -> None:
    wrong = verdict(replayed=CHOSEN[1:], differences=[Difference(25, "loss", "0.5", "0.25")])
    assert not wrong.is_verified
    assert "  FAIL     step 25: loss recorded 0.5, replayed 0.25" in lines(wrong)
    assert lines(wrong)[-1].startswith("result     NOT verified")


def test_a_changed_environment_is_named_beside_a_difference() -> None:
    text = "\n".join(
        lines(verdict(differences=[Difference(1, "loss", "1", "2")], changes=["torch: 1 in the run, 2 now"]))
    )
    assert "differs  torch: 1 in the run, 2 now" in text
    assert "which may be the cause" in text


def test_some_steps_of_a_segment_are_never_reported_as_every_step() -> None:
    one = [Segment(0, 100)]
    some = Verdict("r" * 64, 100, one, [Segment(0, 10)], [Segment(0, 10)])
    assert some.is_verified
    assert lines(some)[-1] == "verified   steps 0-9: 10.0% of the steps"
    every = Verdict("r" * 64, 100, one, one, one)
    assert lines(every)[-1] == "verified   every step of the run"


def test_a_sample_states_what_can_have_escaped() -> None:
    text = "\n".join(lines(verdict()))
    assert "a change in 1 segment is missed with probability 0.60, in 2 segments 0.33" in text


def test_texts_of_a_stranger_cannot_act_on_the_terminal() -> None:
    bad = verdict(mismatches=["\x1b[2Jresult.json"], differences=[Difference(1, "metric \x1b]0;x\x07", "a\nb", "c")])
    assert not any(sign in line for line in lines(bad) for sign in "\x1b\x07\n")


def test_more_replayed_segments_than_there_are_give_no_wrong_probability() -> None:
    odd = verdict(segments=SEGMENTS[:2])
    assert odd.escapes(1) == 0.0
    assert json.loads(odd.to_json())["share"] == 0.4


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
