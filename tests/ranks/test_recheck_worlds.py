"""A rank that computes wrong values, or whose weights have come apart, is named before that is saved."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import recheck as benchmark
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.replica_check import ReplicaCheck
from samebits.parallel.recheck import RecheckedReducer
from samebits.storage.checkpoint import steps
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import STEPS_PER_EPOCH, carry_out, settings

FULL = pytest.mark.full
ALL = {"every": "2 steps", "keep": 9, "recheck": "1/1"}


def carry_out_with_flips(
    world: World, path: Path, config: RunConfig, guilty: int, at: set[int] | None, where: str, bit: int = 0
) -> Any:
    """Train while a rank flips a bit of the leaves that it ends, counted from 0; None: of all, `at` itself else."""
    real, count = RecheckedReducer._end, -1

    def end(reducer: RecheckedReducer, number: int) -> None:
        nonlocal count
        count += 1
        leaf = reducer._sum.leaves[number]
        if world.rank == guilty and (at is None or count in at):
            tail = torch.split(leaf.flat.tail, reducer._sizes)
            values = {"gradient": leaf.flat.values[:8], "loss": tail[1], "buffer": tail[3]}[where]
            values.view(torch.int32)[0] ^= 1 << bit
        real(reducer, number)

    with patch.object(RecheckedReducer, "_end", end):
        return carry_out(world, path, config)


@pytest.fixture
def right(pool: RankPool, tmp_path: Path) -> Any:
    """What a run without rechecks gives in one process."""
    (result,) = pool.run(1, carry_out, tmp_path / "right", settings(every="2 steps", keep=9))
    return result


@pytest.mark.parametrize(
    ("world", "recheck", "num_workers"),
    [(3, "1/1", 1), pytest.param(4, "1/4", 0, marks=FULL)],
)
def test_no_bit_changes(pool: RankPool, right: Any, tmp_path: Path, world: int, recheck: str, num_workers: int) -> None:
    config = settings(every="2 steps", keep=9, recheck=recheck, num_workers=num_workers)
    assert pool.run(world, carry_out, tmp_path / "run", config) == [right] * world


@pytest.mark.parametrize(
    ("world", "guilty", "where", "bit", "num_workers"),
    [
        (3, 1, "gradient", 0, 0),
        pytest.param(3, 0, "loss", 30, 1, marks=FULL),
        (2, 1, "buffer", 3, 0),
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


def corrupt(world: World, path: Path, config: RunConfig, guilty: int, at_step: int, what: str) -> Any:
    """Train, with one rank that changes a tensor of its model before it trains step `at_step`."""
    real = ReplicaCheck.is_due

    def is_due(drift: ReplicaCheck, job: Any) -> bool:
        if world.rank == guilty and job.progress.step == at_step:
            change(job, what)
        return real(drift, job)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaCheck, "is_due", is_due)
        return carry_out(world, path, config)


def change(job: Any, what: str) -> None:
    if what == "weight":
        tensor = next(job.model.parameters())
    elif what == "buffer":
        tensor = next(buffer for buffer in job.model.buffers() if buffer.is_floating_point())
    else:
        tensor = next(iter(job.optimizer.state.values()))["momentum_buffer"]
    with torch.no_grad():
        tensor += 1e-6


def drifting(every: str) -> RunConfig:
    config = settings(every="2 steps", keep=9)
    return config.model_copy(update={"watch": config.watch.model_copy(update={"replica_check_every": every})})


@pytest.mark.parametrize(
    ("world", "guilty", "words"),
    [
        (2, 1, "ranks 0 and 1 differ after step 4"),
        (3, 1, "rank 1 differs from the others after step 4"),
        (3, 0, "rank 0 differs from the others after step 4"),
    ],
)
def test_a_changed_weight_is_named_by_rank(pool: RankPool, tmp_path: Path, world: int, guilty: int, words: str) -> None:
    texts = pool.run(world, corrupt, tmp_path / "run", drifting("2 steps"), guilty, 3, "weight")
    assert len(set(texts)) == 1
    assert words in texts[0]
    assert "equal after step 2; this step was not saved" in " ".join(texts[0].split())
    assert "versions, commit and hardware are equal" in texts[0]
    # What was found was not saved.
    assert steps(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.parametrize(("what", "words"), [("buffer", "running_mean"), ("momentum", "2 of 24 tensors")])
def test_buffers_and_the_optimizer_are_compared_too(pool: RankPool, tmp_path: Path, what: str, words: str) -> None:
    texts = pool.run(2, corrupt, tmp_path / "run", drifting("1 epoch"), 1, STEPS_PER_EPOCH - 1, what)
    assert words in texts[0]
    assert f"differ after step {STEPS_PER_EPOCH}" in texts[0]


def test_by_the_clock_all_ranks_compare_at_the_same_step(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(3, corrupt, tmp_path / "run", drifting("0.000001s"), 2, 1, "weight")
    assert len(set(texts)) == 1
    assert "rank 2 differs from the others after step 2" in texts[0]


def test_the_difference_of_the_odd_ranks_machine_is_reported(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(3, with_other_code, tmp_path / "run", drifting("1 epoch"))
    assert "commit: 1a2b3c on rank 0, 4d5e6f+ on rank 2" in texts[0]


def with_other_code(world: World, path: Path, config: RunConfig) -> Any:
    from samebits.engine import replica_check

    real = replica_check.environment
    with pytest.MonkeyPatch.context() as patch:
        commit = "4d5e6f+" if world.rank == 2 else "1a2b3c"
        patch.setattr(replica_check, "environment", lambda world: {**real(world), "commit": commit})
        return corrupt(world, path, config, 2, 1, "weight")


def test_ranks_that_agree_train_as_without_the_check(pool: RankPool, tmp_path: Path) -> None:
    looked = pool.run(3, carry_out, tmp_path / "looked", drifting("1 steps"))
    unlooked = pool.run(3, carry_out, tmp_path / "unlooked", settings(every="2 steps", keep=9))
    assert [result[0] for result in looked] == [result[0] for result in unlooked]
