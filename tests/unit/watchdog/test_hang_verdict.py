"""Which ranks keep a world waiting, derived from their last heartbeats; and the error text."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from samebits.cluster import abort
from samebits.cluster.activity import COMPUTING, READING, REDUCING
from samebits.cluster.world import alone
from samebits.errors import LaunchError
from samebits.watchdog.detector import HangDetector, RankStatus, explain, find_stalled_ranks

TIMEOUT_S = 60.0


def status(rank: int, **more: Any) -> RankStatus:
    """A rank that has waited for the others' gradients for a little longer than is allowed."""
    waits = RankStatus(rank, "a", 100 + rank, REDUCING, waits=True, step=5, stalled_s=TIMEOUT_S + 1)
    return replace(waits, **more)


def reads(rank: int) -> RankStatus:
    return status(rank, doing=READING, waits=False)


def silent(rank: int, **more: Any) -> RankStatus:
    return status(rank, stalled_s=0.5, silent_s=TIMEOUT_S, **more)


@pytest.mark.parametrize(
    ("statuses", "culprits"),
    [
        ([status(0), reads(1), status(2)], [1]),
        ([reads(0), status(1), reads(2)], [0, 2]),
        ([status(0), status(1)], [0, 1]),  # each waits for the other
        ([reads(0)], [0]),  # a process that is alone
        ([status(0), silent(1), status(2)], [1]),
        ([silent(0, serves=True), silent(1), status(2)], [0]),  # nothing is reported of rank 1 without rank 0
        ([status(0), silent(1), reads(2)], [1, 2]),
    ],
)
def test_ranks_that_are_busy_or_silent_keep_the_waiting_ones(statuses: list[RankStatus], culprits: list[int]) -> None:
    assert [found.rank for found in find_stalled_ranks(statuses, TIMEOUT_S)] == culprits


@pytest.mark.parametrize("doing", [READING, COMPUTING, "evaluating"])
def test_no_rank_is_to_blame_while_one_makes_progress(doing: str) -> None:
    busy = status(1, doing=doing, waits=False, stalled_s=3.0)
    assert find_stalled_ranks([status(0, stalled_s=10 * TIMEOUT_S), busy], TIMEOUT_S) == []
    # It was reported a moment ago: not yet silent.
    assert find_stalled_ranks([status(0), replace(busy, silent_s=2.0)], TIMEOUT_S) == []


def test_the_text_names_the_rank_its_activity_the_duration_and_a_fix() -> None:
    text = str(explain([reads(1)], 3, TIMEOUT_S, "run/logs/stacks-rank-*.txt"))
    assert text.splitlines()[0] == "hang: rank 1 has made no progress for 61 s: reading samples, step 5"
    assert "rank 1 (host a, pid 101)" in text
    assert "2 ranks waited for it" in text
    assert "network disk" in text
    assert "run/logs/stacks-rank-*.txt" in text
    assert "watch.hang_timeout_s=180" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("culprit", "text"),
    [
        (silent(1, is_here=True, is_stopped=True), "kill -CONT 101"),
        (silent(1, is_here=True), "native code never releases Python's interpreter lock, see its stack"),
        (silent(1, is_here=True), "or the network to it is cut"),
        (silent(1), "its machine or the network to it is down"),
        (status(1, doing=COMPUTING, waits=False), "the device does not answer"),
        (status(1, doing="evaluating", waits=False), "see its stack"),
    ],
)
def test_the_likely_cause_follows_from_what_is_known(culprit: RankStatus, text: str) -> None:
    assert text in str(explain([culprit], 2, TIMEOUT_S, "stacks"))


def test_ranks_that_wait_for_each_other_are_not_blamed_one_by_one() -> None:
    text = str(explain([status(0), status(1)], 2, TIMEOUT_S, "stacks"))
    assert "all ranks have waited for each other for 61 s: reducing gradients, step 5" in text
    assert "the network between them is cut" in text


def test_a_rank_without_any_heartbeat_has_no_last_activity() -> None:
    text = str(explain([silent(1, doing="", step=None)], 2, TIMEOUT_S, "stacks"))
    assert "rank 1 has given no sign of life for 60 s\n" in text


def test_a_run_may_continue_after_a_hang_as_after_a_lost_process() -> None:
    assert isinstance(explain([reads(1)], 2, TIMEOUT_S, ""), LaunchError)


def test_a_rank_that_knows_of_a_hang_reports_it_not_lost_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(abort, "abort", lambda error: ended.append(str(error)))

    def lose() -> None:
        with HangDetector(alone("cpu"), 0.8, tmp_path) as heartbeat:
            heartbeat._verdict = {"by": 1, "culprits": [asdict(reads(1))]}
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        lose()
    assert ended
    assert ended[0].startswith("hang: the run has made no progress for 61 s: reading samples, step 5\n")
