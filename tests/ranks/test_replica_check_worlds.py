"""A rank whose weights have come apart is named before that is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.engine.replica_check import ReplicaCheck
from samebits.storage.checkpoint import steps
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import STEPS_PER_EPOCH, carry_out, settings


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
        (2, 1, "rank 0 and rank 1 differ after step 4"),
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
