"""Slow ranks: compared by the time of a micro-batch, and reported once after a while."""

from samebits.report.stragglers import WINDOW_S, Stragglers


def after(steps: int, micro_s: list[float], shares: list[int]) -> list[tuple[float, int, int]]:
    """Own work of ranks after some steps, of `shares` micro-batches each that take `micro_s`."""
    return [(steps * share * time, steps, steps * share) for time, share in zip(micro_s, shares, strict=True)]


def texts(micro_s: list[float], shares: list[int], num_windows: int = 6) -> list[str]:
    stragglers = Stragglers()
    said = [stragglers.notice(after(100 * turn, micro_s, shares), turn * WINDOW_S) for turn in range(num_windows + 1)]
    return [text for text in said if text]


def test_a_rank_that_stays_slower_is_named_once_with_by_how_much() -> None:
    (text,) = texts([0.010, 0.021, 0.012], [2, 2, 2])
    assert "rank 1 is slow: a micro-batch takes 21 ms there and 11 ms on the other ranks" in text


def test_a_rank_with_more_micro_batches_is_not_slow() -> None:
    assert texts([0.010, 0.010, 0.010], [3, 3, 2]) == []


def test_a_rank_that_has_nothing_to_do_is_not_compared() -> None:
    assert texts([0.010, 0.010, 0.0], [1, 1, 0]) == []
    assert texts([0.010, 0.0], [1, 0]) == []
    assert texts([0.010], [1]) == []


def test_one_slow_window_is_not_enough() -> None:
    assert texts([0.010, 0.020], [1, 1], num_windows=1) == []
    stragglers = Stragglers()
    works = [after(0, [0, 0], [1, 1]), [(1.0, 100, 100), (2.0, 100, 100)], [(2.0, 200, 200), (3.0, 200, 200)],
             [(3.0, 300, 300), (5.0, 300, 300)]]  # fmt: skip
    assert [stragglers.notice(work, turn * WINDOW_S) for turn, work in enumerate(works)] == [None] * 4


def test_own_work_of_a_step_is_since_the_last_look_and_waits_for_news_of_all() -> None:
    stragglers = Stragglers()
    assert stragglers.step_ms([]) == {}
    assert stragglers.step_ms([(1.0, 10, 20), (1.0, 10, 20)]) == {}
    assert stragglers.step_ms([(2.0, 20, 40), (1.0, 10, 20)]) == {}  # nothing new of rank 1
    figures = stragglers.step_ms([(2.0, 20, 40), (2.5, 20, 40)])
    assert figures == {"median_ms": 125.0, "max_ms": 150.0, "slowest": 1, "rank_0_ms": 100.0, "rank_1_ms": 150.0}


def test_of_many_ranks_only_the_middle_and_the_slowest_are_written() -> None:
    stragglers = Stragglers()
    stragglers.step_ms([(0.0, 0, 0)] * 100)
    figures = stragglers.step_ms([(1.0 + rank / 100, 10, 10) for rank in range(100)])
    assert figures.keys() == {"median_ms", "max_ms", "slowest"}
    assert figures["slowest"] == 99
