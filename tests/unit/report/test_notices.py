"""What a run notices: waits for data, idle processes, slow ranks and a loss that grows."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.report.speed import LOADING_WINDOW_S as WINDOW_S
from samebits.report.speed import (
    STRAGGLER_WINDOW_S,
    DataWait,
    LossTrend,
    Stragglers,
    advice,
    block_size,
    grows_from,
    idle_row,
)


def test_the_share_is_that_since_the_last_call() -> None:
    wait = DataWait()
    wait.start(100.0, 50.0)  # a resumed run
    assert wait.share(110.0, 51.0) == pytest.approx(0.1)
    assert wait.share(114.0, 53.0) == pytest.approx(0.5)
    assert wait.share(114.0, 53.0) == 0.0


def test_a_bottleneck_is_reported_once_and_only_after_a_while() -> None:
    wait = DataWait()
    wait.start(0.0, 0.0)
    assert wait.notice(0.9 * WINDOW_S, 0.9 * WINDOW_S, "more workers") is None
    text = wait.notice(WINDOW_S, 0.4 * WINDOW_S, "more workers")
    assert text == "data loading is the bottleneck: 40.0% of training time waits for it\n  fix  more workers"
    assert wait.notice(3 * WINDOW_S, 3 * WINDOW_S, "more workers") is None


def test_a_slow_first_epoch_that_fills_a_cache_does_not_hide_a_later_one_without() -> None:
    wait = DataWait()
    assert wait.notice(WINDOW_S, 0.1 * WINDOW_S, "") is None
    assert wait.notice(2 * WINDOW_S, 0.5 * WINDOW_S, "") is not None


@pytest.mark.parametrize(
    ("num_workers", "num_free", "text"),
    [
        (0, 3, "loader.num_workers=3 (now 0: loading in the training process; 3 cores are free per rank)"),
        (2, 3, "loader.num_workers=3 (now 2; "), (0, 1, "1 core is free per rank"), (0, 0, "All cores are in use"),
        (0, -1, "All cores are in use"), (4, 3, "All cores are in use"),
    ],
)  # fmt: skip
def test_the_advice_can_be_followed_here(num_workers: int, num_free: int, text: str) -> None:
    found = advice(num_workers=num_workers, num_free_cores=num_free)
    assert text in found
    assert len(found.splitlines()) == 1


def num_micro(batch: int, micro_batch: int) -> int:
    return -(-batch // micro_batch)


def test_busy_processes_are_not_reported() -> None:
    assert idle_row(1, 1, 1) == idle_row(8, 48, 6) == idle_row(3, 64, 16) == ""


def test_the_idle_row_has_the_number_of_idle_processes_and_a_fix() -> None:
    assert idle_row(8, 48, 12) == (
        "4 of 8 processes are idle: a step has 4 micro-batches\n"
        "micro_batch=6 gives all of them work (and changes the result)"
    )
    assert idle_row(2, 32, 32).startswith("1 of 2 processes is idle: a step has 1 micro-batch\nmicro_batch=31 ")


def test_a_step_of_fewer_samples_than_processes_has_no_work_for_all() -> None:
    row = idle_row(8, 7, 4)
    assert row.splitlines()[1] == "no micro_batch gives all of them work: a step has 7 samples"
    assert row.startswith("6 of 8 ")


@pytest.mark.parametrize("batch", [1, 7, 8, 48, 63, 64, 65, 1000])
@pytest.mark.parametrize("num_procs", [2, 3, 7, 8, 64])
def test_the_micro_batch_that_is_named_is_the_largest_of_those_that_do(num_procs: int, batch: int) -> None:
    those = [size for size in range(1, batch + 1) if num_micro(batch, size) >= num_procs]
    row = idle_row(num_procs, batch, batch)
    assert row.splitlines()[1].startswith(f"micro_batch={max(those)} " if those else "no micro_batch ")


def test_the_longest_fits_into_80_columns() -> None:
    lines = idle_row(1024, 100_000, 100_000).splitlines() + idle_row(1024, 1000, 1000).splitlines()
    assert max(map(len, lines)) <= 80 - len("  gradients  ")


def after(steps: int, micro_s: list[float], shares: list[int]) -> list[tuple[float, int, int]]:
    """Own work of ranks after some steps, of `shares` micro-batches each that take `micro_s`."""
    return [(steps * share * time, steps, steps * share) for time, share in zip(micro_s, shares, strict=True)]


def texts(micro_s: list[float], shares: list[int], num_windows: int = 6) -> list[str]:
    stragglers = Stragglers()
    said = [
        stragglers.notice(after(100 * turn, micro_s, shares), turn * STRAGGLER_WINDOW_S)
        for turn in range(num_windows + 1)
    ]
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
    assert [stragglers.notice(work, turn * STRAGGLER_WINDOW_S) for turn, work in enumerate(works)] == [None] * 4


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


LOSSES = st.lists(st.floats(0.001, 1000), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(means=LOSSES)
def test_a_loss_that_falls_never_grows(means: list[float]) -> None:
    assert grows_from(sorted(means, reverse=True)) is None


@settings(max_examples=200, deadline=None)
@given(noise=st.lists(st.floats(0.81, 1.19), min_size=1, max_size=30), level=st.floats(0.001, 1000))
def test_noise_of_a_fifth_is_no_growth(noise: list[float], level: float) -> None:
    assert grows_from([level * each for each in noise]) is None


@settings(max_examples=200, deadline=None)
@given(means=LOSSES, power=st.integers(-20, 20))
def test_the_unit_of_the_loss_does_not_matter(means: list[float], power: int) -> None:
    assert grows_from([mean * 2.0**power for mean in means]) == grows_from(means)


@settings(max_examples=200, deadline=None)
@given(means=LOSSES, factor=st.floats(1.01, 100))
def test_a_single_high_block_is_no_growth_and_two_are(means: list[float], factor: float) -> None:
    high = (min(means) + max(means) * 0.5) * factor
    falling = sorted(means, reverse=True)
    assert grows_from([*falling, high]) is None
    assert grows_from([*falling, high, high]) == falling.index(min(falling))


def test_a_resumed_run_compares_with_the_loss_of_its_start() -> None:
    means = [0.01, 0.02, 0.03]
    assert grows_from(means) == 0
    assert grows_from(means, first=2.3) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_notice_names_the_steps_and_comes_once(bad: float) -> None:
    trend = LossTrend(40)
    trend.start(0, None)
    losses = [1.6, bad, 1.6, 1.6] + [1.4] * 4 + [20.0] * 4 + [750.0] * 28
    texts = [text for loss in losses if (text := trend.add(loss))]
    assert texts == ["the training loss grows: from 1.4 in steps 5-8 to 750 in steps 13-16"]


@given(num_steps=st.integers(1, 10**9))
def test_blocks_have_4_to_50_steps(num_steps: int) -> None:
    assert 4 <= block_size(num_steps) <= 50
