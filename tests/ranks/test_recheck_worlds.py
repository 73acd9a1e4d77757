"""A rank that computes wrong values is named, and its step repeated, so that the run ends with the right bits."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import recheck as benchmark
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.parallel.bucket import Bucket, Leaf
from samebits.parallel.recheck import RecheckedReducer
from samebits.storage.checkpoint import steps
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out, settings

FULL = pytest.mark.full
ALL = {"every": "2 steps", "keep": 9, "recheck": "1/1"}


def carry_out_with_flips(
    world: World, path: Path, config: RunConfig, guilty: int, at: set[int] | None, where: str, bit: int = 0
) -> Any:
    """Train while a rank flips a bit of the leaves that it ends, counted from 0; None: of all, `at` itself else."""
    real, count = RecheckedReducer._end, -1

    def end(reducer: RecheckedReducer, bucket: Bucket, leaf: Leaf) -> None:
        nonlocal count
        count += 1
        if world.rank == guilty and (at is None or count in at):
            tail = torch.split(leaf.flat.tail, reducer._sizes)
            values = {"gradient": leaf.flat.values[:8], "loss": tail[1], "buffer": tail[3]}[where]
            values.view(torch.int32)[0] ^= 1 << bit
        real(reducer, bucket, leaf)

    with patch.object(RecheckedReducer, "_end", end):
        return carry_out(world, path, config)


@pytest.fixture
def right(pool: RankPool, tmp_path: Path) -> Any:
    """What a run without rechecks gives in one process."""
    (result,) = pool.run(1, carry_out, tmp_path / "right", settings(every="2 steps", keep=9))
    return result


@pytest.mark.parametrize(
    ("world", "recheck", "num_workers"),
    [(3, "1/1", 1), pytest.param(2, "1/1", 0, marks=FULL), pytest.param(4, "1/4", 0, marks=FULL)],
)
def test_rechecks_change_no_bit(
    pool: RankPool, right: Any, tmp_path: Path, world: int, recheck: str, num_workers: int
) -> None:
    config = settings(every="2 steps", keep=9, recheck=recheck, num_workers=num_workers)
    assert pool.run(world, carry_out, tmp_path / "run", config) == [right] * world


@pytest.mark.parametrize(
    ("world", "guilty", "where", "bit", "num_workers"),
    [
        (3, 1, "gradient", 0, 0),
        pytest.param(3, 0, "loss", 30, 1, marks=FULL),
        (2, 1, "buffer", 3, 0),
        pytest.param(2, 0, "gradient", 22, 0, marks=FULL),
    ],
)
def test_one_flipped_bit_is_named_and_the_run_ends_with_the_right_bits(
    pool: RankPool, right: Any, tmp_path: Path, world: int, guilty: int, where: str, bit: int, num_workers: int
) -> None:
    config = settings(num_workers=num_workers, **ALL)
    results = pool.run(world, carry_out_with_flips, tmp_path / "run", config, guilty, {5}, where, bit)
    for result in results:
        assert result[:3] == right[:3]
        (text,) = result[3]
        assert text.startswith(f"training error: rank {guilty} computed wrong values: micro-batch")
        assert "the step was repeated with equal results, and training continues" in text
        assert f"rank {guilty} (host here)" in text


def test_a_rank_that_is_wrong_again_in_the_repeated_step_ends_the_run(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(3, carry_out_with_flips, tmp_path / "run", settings(**ALL), 2, None, "gradient")
    assert len(set(texts)) == 1
    assert "rank 2 computed wrong values" in texts[0]
    assert "results differed again when it was repeated" in texts[0]
    assert steps(tmp_path / "run" / "checkpoints") == []


def test_a_rank_that_is_wrong_again_in_a_later_step_ends_the_run(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(3, carry_out_with_flips, tmp_path / "run", settings(**ALL), 2, {1, 25}, "gradient")
    assert len(set(texts)) == 1
    assert "the run stopped, since rank 2 was wrong at step 0 too" in texts[0]


def test_of_two_ranks_that_always_differ_both_are_named(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(2, carry_out_with_flips, tmp_path / "run", settings(**ALL), 1, None, "gradient")
    assert len(set(texts)) == 1
    assert "ranks 0 1 computed other values" in texts[0]
    assert "without a majority for either" in texts[0]


def test_one_process_alone_says_that_it_repeats_nothing(pool: RankPool) -> None:
    (warnings,) = pool.run(1, warnings_of_a_job)
    assert warnings == ["watch.recheck needs two or more processes: nothing is repeated on this one"]


def warnings_of_a_job(world: World) -> list[str]:
    return benchmark.job_with("tiny", world, 2, 2, "1/50").warnings


@pytest.mark.full
def test_a_rank_that_flips_a_bit_in_one_of_20_micro_batches_is_named(pool: RankPool) -> None:
    for number in range(3):
        for faulty, text, num_steps in pool.run(3, benchmark.trial, number, 4, "1/5"):
            assert text.startswith(f"training error: rank {faulty} computed wrong values"), text
            assert num_steps <= 150
