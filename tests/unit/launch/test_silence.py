"""Which nodes are silent, by the reader's clock: at rest, after a broken connection, and after a pause."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samebits.launch.nodes import board
from samebits.launch.nodes.board import EXCHANGE_S, SETTLING_S, SILENT_LOOKS, SILENT_S, SilentNodes


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(board.time, "monotonic", made.monotonic)
    return made


def seconds_until(
    clock: Clock, look: Callable[[int], set[int]], silent: set[int], every_s: float = EXCHANGE_S
) -> float:
    """Return how long it takes until these nodes are silent; `look` gets a count that grows with each look."""
    began, count = clock.now, 1
    while look(count) != silent:
        assert clock.now < began + 2000.0
        clock.now += every_s
        count += 1
    return clock.now - began


def test_a_node_whose_count_stands_still_is_silent_and_comes_back(clock: Clock) -> None:
    silence = SilentNodes(10.0)
    assert seconds_until(clock, lambda count: silence.look({0: count, 1: 5}, False), {1}) == pytest.approx(
        10.0, abs=0.1
    )
    assert silence.has_timed_out(1)
    assert not silence.has_timed_out(0)
    assert silence.look({0: 10**6, 1: 6}, False) == set()
    assert not silence.has_timed_out(1)


def test_a_node_that_is_silent_after_a_broken_connection_is_lost_soon(clock: Clock) -> None:
    silence = SilentNodes(900.0)
    assert silence.look({0: 1, 1: 1, 2: 1}, False) == set()
    took = seconds_until(clock, lambda count: silence.look({0: count, 1: 1, 2: count}, True), {1})
    assert SILENT_S <= took < SILENT_S + 3 * EXCHANGE_S
    assert not silence.has_timed_out(1), "that takes 900 s"
    for _ in range(100):  # long after it has settled
        clock.now += EXCHANGE_S
        assert 1 in silence.look({1: 1}, False), "lost, until it writes again"
    assert silence.look({1: 2}, False) == set()


@pytest.mark.parametrize("pause_s", [0.0, 1.1 * SETTLING_S])
def test_a_second_node_that_is_lost_during_the_recovery_is_lost_soon(clock: Clock, pause_s: float) -> None:
    silence = SilentNodes(900.0)
    seconds_until(clock, lambda count: silence.look({1: 1, 2: count}, True), {1})
    # The next view has begun, in which no connection breaks, since the third node has made none; on a busy machine.
    clock.now += pause_s
    took = seconds_until(clock, lambda count: silence.look({1: 1, 2: 10**6}, False), {1, 2})
    assert took <= SILENT_LOOKS * max(SILENT_S, pause_s) + 3 * EXCHANGE_S


def test_the_others_are_not_silent_during_a_pause_of_the_store_or_of_this_launcher(clock: Clock) -> None:
    silence = SilentNodes(10.0)
    assert silence.look({0: 1, 1: 1}, False) == set()
    clock.now += 60.0
    assert silence.look({0: 2, 1: 1}, False) == set()
    assert seconds_until(clock, lambda count: silence.look({0: 2 + count, 1: 1}, False), {1}) > 5.0


def test_a_launcher_that_looks_seldom_does_not_take_others_for_silent(clock: Clock) -> None:
    silence = SilentNodes(900.0)
    silence.look({1: 1}, True)
    for _ in range(SILENT_LOOKS):
        assert silence.look({1: 1}, True) == set()
        clock.now += SILENT_S
    assert seconds_until(clock, lambda count: silence.look({1: 1}, True), {1}, every_s=SILENT_S) <= 2 * SILENT_S


@pytest.mark.parametrize("limit_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize("every_s", [EXCHANGE_S, 2 * EXCHANGE_S])
def test_nodes_that_exchange_as_they_should_are_never_silent(clock: Clock, limit_s: float, every_s: float) -> None:
    first, second = SilentNodes(limit_s), SilentNodes(limit_s)
    for count in range(400):
        is_broken = 100 <= count < 102  # only one of them sees it
        assert (
            first.look({0: count, 1: count // 2}, is_broken) == second.look({0: count, 1: count // 2}, False) == set()
        )
        clock.now += every_s
