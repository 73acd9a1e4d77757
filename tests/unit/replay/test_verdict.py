"""Verdicts: what they conclude, and what they report."""

import json
from dataclasses import replace
from typing import Any

from samebits.replay.segments import Difference, Segment, cut
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
