"""Verdicts: of one verifier, of a part, and merged; written and read again."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samebits.errors import ConfigError
from samebits.verify.compare import Difference
from samebits.verify.segments import Segment, cut, share_of
from samebits.verify.verdict import Verdict, lines, merge, read_verdict

SEGMENTS = cut(range(0, 100, 10), 100)
CHOSEN = SEGMENTS[2:6]


def verdict(part: int = 1, num_parts: int = 1, **changes: Any) -> Verdict:
    mine = share_of(CHOSEN, part, num_parts)
    whole = Verdict("r" * 64, 100, SEGMENTS, CHOSEN, assigned=mine, replayed=mine, seconds=1.0)
    return replace(whole, **changes)


def saved(path: Path, content: Verdict) -> Path:
    path.write_text(content.to_json())
    return path


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    before = verdict(differences=[Difference(3, "loss", "0.5", "0.25")], mismatches=["a"], changes=["b"], notes=["c"])
    assert read_verdict(saved(tmp_path / "v.json", before)) == before


def test_a_part_is_verified_by_itself_and_says_what_is_left() -> None:
    part = verdict(1, 2)
    assert part.is_verified
    assert part.is_part
    text = "\n".join(lines(part))
    assert "verified   this part; steps 30-39, 50-59 are left to others" in text
    assert "--merge" in text


def test_all_parts_together_are_the_verdict_of_one_verifier() -> None:
    parts = [verdict(part, 3) for part in (3, 1, 2)]
    merged = merge(parts)
    assert merged == replace(verdict(), seconds=3.0)
    assert merged.is_verified
    assert not merged.is_part
    assert lines(merged)[1].startswith("verified   40.0% of the steps, 4 of 10 segments")


def test_a_part_that_is_missing_leaves_the_merged_verdict_incomplete() -> None:
    merged = merge([verdict(part, 3) for part in (1, 2)])
    assert not merged.is_verified
    assert "incomplete: steps 40-49 were not replayed" in lines(merged)[-1]


def test_a_difference_in_one_part_is_one_of_the_merged_verdict() -> None:
    wrong = Difference(35, "loss", "0.5", "0.25")
    second = verdict(2, 2)
    second = replace(second, replayed=second.replayed[1:], differences=[wrong])
    assert not second.is_verified
    merged = merge([verdict(1, 2), second])
    assert not merged.is_verified
    assert merged.differences == [wrong]
    assert "  FAIL     step 35: loss recorded 0.5, replayed 0.25" in lines(merged)
    assert lines(merged)[-1].startswith("result     NOT verified")


def test_a_changed_environment_is_named_beside_a_difference() -> None:
    text = "\n".join(
        lines(verdict(differences=[Difference(1, "loss", "1", "2")], changes=["torch: 1 in the run, 2 now"]))
    )
    assert "differs  torch: 1 in the run, 2 now" in text
    assert "which may be the cause" in text


def test_verdicts_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="different runs"):
        merge([verdict(), verdict(root="s" * 64)])
    with pytest.raises(ConfigError, match="different runs"):
        merge([verdict(), verdict(num_steps=90)])
    with pytest.raises(ConfigError, match="different segments"):
        merge([verdict(), verdict(segments=SEGMENTS[:3])])


def test_some_steps_of_a_segment_are_never_reported_as_every_step() -> None:
    one = [Segment(0, 100)]
    some = Verdict("r" * 64, 100, one, [Segment(0, 10)], [Segment(0, 10)], [Segment(0, 10)])
    assert some.is_verified
    assert lines(some)[-1] == "verified   steps 0-9: 10.0% of the steps"
    every = Verdict("r" * 64, 100, one, one, one, one)
    assert lines(every)[-1] == "verified   every step of the run"


def test_a_sample_states_what_can_have_escaped() -> None:
    text = "\n".join(lines(verdict()))
    assert "a change in 1 segment is missed with probability 0.60, in 2 segments 0.33" in text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"root": "a", "num_steps": "b"}',
        b'{"root": "a", "num_steps": 1, "segments": [{"start": "x", "stop": 2}]}',
        b'{"root": "a", "num_steps": 1, "differences": [{}]}',
    ],
)
def test_a_file_that_is_no_verdict_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "v.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a verdict"):
        read_verdict(path)


def test_a_verdict_that_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="can't be read"):
            read_verdict(path)


def test_texts_of_a_stranger_cannot_act_on_the_terminal() -> None:
    bad = verdict(mismatches=["\x1b[2Jresult.json"], differences=[Difference(1, "metric \x1b]0;x\x07", "a\nb", "c")])
    assert not any(sign in line for line in lines(bad) for sign in "\x1b\x07\n")


def test_more_replayed_segments_than_there_are_give_no_wrong_probability() -> None:
    odd = verdict(segments=SEGMENTS[:2])
    assert odd.escapes(1) == 0.0
    assert json.loads(odd.to_json())["share"] == 0.4
