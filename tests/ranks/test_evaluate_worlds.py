"""Evaluation over real processes: each sample once, the same digits; and a stop that reaches everybody."""

import pytest

from tests.ranks import jobs
from tests.ranks.rank_pool import RankPool

WORLDS = (1, 2, 3, 4)


@pytest.mark.parametrize(("num_samples", "batch_size"), [(37, 5), (8, 8), (3, 1), (64, 100), (50, 16)])
def test_each_sample_is_evaluated_once_alike_in_all_worlds(pool: RankPool, num_samples: int, batch_size: int) -> None:
    all_figures = []
    for world in WORLDS:
        results = pool.run(world, jobs.evaluated, num_samples, batch_size)
        batches = results[0][1]  # rank 0 has everybody's
        assert sorted(index for batch in batches for index in batch) == list(range(num_samples))
        # The same samples go through the model together, whatever the world.
        assert sorted(batches) == [
            list(range(start, min(start + batch_size, num_samples))) for start in range(0, num_samples, batch_size)
        ]
        for figures, own, is_training, progress in results:
            assert len(own) <= len(batches)
            assert is_training
            assert [done for done, _ in progress] == list(range(1, len(progress) + 1))
            assert all(total == len(progress) for _, total in progress)
            all_figures.append(figures)
    assert set(all_figures[0]) == {"loss", "cross_entropy", "size", "top1"}
    assert all(figures == all_figures[0] for figures in all_figures)
    assert all_figures[0]["loss"] == pytest.approx(all_figures[0]["cross_entropy"] + all_figures[0]["size"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_evaluation_that_one_rank_leaves_is_left_by_all(pool: RankPool, world: int) -> None:
    asked = world - 1
    results = pool.run(world, jobs.left_evaluation, asked)
    assert all(is_left for is_left, _ in results)
    # The others come to the end of theirs, and learn of it there.
    assert [seen for _, seen in results] == [1 if rank == asked else 12 // world for rank in range(world)]


def test_workers_change_no_digit(pool: RankPool) -> None:
    without, with_workers = (pool.run(2, jobs.evaluated, 37, 5, num_workers)[0] for num_workers in (0, 1))
    assert without == with_workers


def test_workers_are_forked_however_their_rank_was_started(pool: RankPool) -> None:
    assert pool.run(1, jobs.read_with_a_worker) == [("spawn", True)]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (jobs.Forgetful, "training error: evaluated 32 samples, the dataset has 37"),
        (jobs.Broken, "training error: the metric Broken has failed: ZeroDivisionError: "),
    ],
)
def test_a_metric_that_loses_samples_or_fails_ends_all_ranks_with_one_text(
    pool: RankPool, world: int, metric: type[jobs.Seen], text: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        pool.run(world, jobs.evaluated, 37, 8, 0, metric)
    assert str(caught.value).count(text) == world
    assert "gave no answer" not in str(caught.value)


@pytest.mark.parametrize(("world", "asked"), [(world, asked) for world in WORLDS for asked in range(world)])
def test_a_stop_asked_of_any_rank_reaches_rank_0(pool: RankPool, world: int, asked: int) -> None:
    answers = pool.run(world, jobs.stop_flags, asked, 3)
    # Rank 0's answer is the one that counts: it travels with the gradients.
    assert answers[0][1:] == [True, True]
    assert answers[asked] == [True, True, True]


@pytest.mark.parametrize("world", WORLDS)
def test_no_rank_stops_without_a_signal(pool: RankPool, world: int) -> None:
    assert pool.run(world, jobs.stop_flags, -1, 3) == [[False, False, False]] * world
