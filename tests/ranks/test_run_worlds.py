"""A run over real processes: the same weights after any stops and changes of world; faults that all agree on."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from samebits.cluster.world import World
from samebits.data.division import Alone
from samebits.data.order import Order
from samebits.storage.checkpoint import load_checkpoint, steps
from samebits.storage.weights import weights_of, weights_sha256
from tests.ranks import runs_in_ranks
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import NUM_SAMPLES, STEPS_PER_EPOCH, carry_out, settings, worlds_after_restore

NUM_STEPS = 2 * STEPS_PER_EPOCH


@pytest.fixture
def straight(pool: RankPool, tmp_path: Path) -> Any:
    """What a run gives that one process carries out without a stop."""
    (result,) = pool.run(1, carry_out, tmp_path / "straight", settings())
    assert result[2]
    return result


@pytest.mark.parametrize(
    ("world", "num_workers"),
    [(2, 0), (3, 1), pytest.param(4, 0, marks=pytest.mark.full)],
)
def test_a_run_is_equal_in_worlds(pool: RankPool, straight: Any, tmp_path: Path, world: int, num_workers: int) -> None:
    results = pool.run(world, carry_out, tmp_path / "run", settings(num_workers=num_workers))
    assert results == [straight] * world


# After the first and the last step, and in and at the end of an epoch.
@pytest.mark.parametrize("stop_at", [0, 2, 3, NUM_STEPS - 1])
def test_a_run_stopped_anywhere_resumes_elsewhere(pool: RankPool, straight: Any, tmp_path: Path, stop_at: int) -> None:
    before, after = 1 + stop_at % 4, 1 + (stop_at + 1) % 4
    stopped = pool.run(before, carry_out, tmp_path / "run", settings(), "auto", stop_at)
    assert {(result[1]["step"], result[2]) for result in stopped} == {(stop_at + 1, False)}
    assert pool.run(after, carry_out, tmp_path / "run", settings()) == [straight] * after


class Linear(nn.Sequential):
    """Muon needs hidden matrices."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))


def carry_out_linear(world: World, *arguments: Any) -> Any:
    with patch.object(runs_in_ranks, "WithBatchNorm", Linear):
        return carry_out(world, *arguments)


@pytest.mark.parametrize(
    "more",
    [
        {"optim": {"name": "adam"}},
        {"optim": {"name": "adamw"}},
        {"optim": {"ema": 0.9, "decay_norms_and_biases": False, "weight_decay": 0.1}},
        {"precision": "bf16"},
        {"precision": "fp16", "batch_norm": "sync"},
        *(
            pytest.param(more, marks=pytest.mark.full)
            for more in (
                {"optim": {"name": "lamb", "weight_decay": 0.1}}, {"optim": {"name": "muon", "weight_decay": 0.1}},
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_other_settings_give_one_hash(pool: RankPool, straight: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    config = settings(every="2 steps", **more)
    train = carry_out_linear if more.get("optim", {}).get("name") == "muon" else carry_out
    (expected,) = pool.run(1, train, tmp_path / "1", config)
    assert expected[2]
    assert expected[0] != straight[0]
    if "precision" in more:
        assert expected[1]["metrics"]["loss"] == pytest.approx(straight[1]["metrics"]["loss"], rel=0.1)
    for world in (2, 4):
        assert pool.run(world, train, tmp_path / str(world), config) == [expected] * world
    pool.run(3, train, tmp_path / "stopped", config, "auto", 4)
    assert pool.run(2, train, tmp_path / "stopped", config) == [expected] * 2


def test_a_run_resumes_from_a_checkpoint_before_a_truncated(pool: RankPool, straight: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(2, carry_out, run, settings(), "auto", 4)
    assert steps(run / "checkpoints") == [4, 5]  # after the first epoch as the best, and where it stopped
    torn = run / "checkpoints" / "step-000005" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    results = pool.run(2, carry_out, run, settings())
    assert [result[:3] for result in results] == [straight[:3]] * 2
    assert f"{torn} is truncated" in results[0][3][0]


def test_a_run_whose_checkpoints_are_all_truncated_does_not_restart_silently(pool: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(1, carry_out, run, settings(keep=1), "auto", 2)
    for path in (run / "checkpoints").glob("step-*/state.json"):
        path.write_text("{}")
    (text,) = pool.run(1, carry_out, run, settings(keep=1))
    assert "none of the 1 checkpoints" in text


def test_every_third_step_is_saved_and_the_best_stays(pool: RankPool, straight: Any, tmp_path: Path) -> None:
    folder = tmp_path / "straight" / "checkpoints"
    best = json.loads((folder / "best.json").read_text())
    assert best == straight[1]["best"]
    assert set(steps(folder)) >= {6, best["step"]}
    assert len(steps(folder)) <= 3


def poisoned(step: int) -> tuple[int, int]:
    """A sample of a step, and the micro-batch that it is in."""
    order = Order(NUM_SAMPLES, 16, 3, seed=0)
    (plan,) = order.steps(Alone(), start=step, stop=step + 1)
    micro = plan.micro_batches[-1]
    return int(micro.indices[0]), micro.index


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_step_that_is_not_finite_stops_all_ranks_with_one_text(pool: RankPool, tmp_path: Path, world: int) -> None:
    sample, micro = poisoned(5)
    config = settings(every="2 steps")
    # Good in the first epoch, bad from then on.
    pool.run(1, carry_out, tmp_path / "run", config, "auto", 3)
    texts = pool.run(world, carry_out, tmp_path / "run", config, "auto", -1, (sample, 99))
    assert len(set(texts)) == 1
    assert f"loss is not finite at step 5 on rank {world - 1}, micro-batch {micro}" in texts[0]
    assert "loss nan" in texts[0]
    assert "stop (watch.nonfinite=stop); the step changed nothing; checkpoint of step 4 is whole" in texts[0]
    report = json.loads((tmp_path / "run" / "nonfinite-5.json").read_text())
    assert sample in report["samples"]


def test_samples_that_the_data_set_finishes_on_the_device_are_examined_too(pool: RankPool, tmp_path: Path) -> None:
    sample, _ = poisoned(5)
    (text,) = pool.run(1, carry_out, tmp_path / "run", settings(), "auto", -1, (sample, 99, True))
    assert "loss is not finite at step" in text
    assert "loss nan" in text


def test_a_step_that_is_not_finite_is_skipped_alike_in_all_worlds(pool: RankPool, tmp_path: Path) -> None:
    sample, _ = poisoned(2)
    config = settings(nonfinite="skip")
    results = [
        result
        for world in (1, 2, 3)
        for result in pool.run(world, carry_out, tmp_path / f"run-{world}", config, "auto", -1, (sample, 2))
    ]
    assert len({result[0] for result in results}) == 1
    assert all(result[1]["skipped"] == [2] and result[2] for result in results)


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_goes_back_to_its_checkpoint_and_ends_with_the_weights_of_a_run_without_the_fault(
    pool: RankPool, straight: Any, tmp_path: Path, world: int
) -> None:
    sample, _ = poisoned(2)
    config = settings(every="2 steps", keep=2, nonfinite="rollback")
    # Read once for the step and once to find the fault: then it is gone.
    results = pool.run(world, carry_out, tmp_path / "run", config, "auto", -1, (sample, 2))
    assert [result[0] for result in results] == [straight[0]] * world
    assert results[0][1]["skipped"] == []


def test_a_run_that_goes_back_behind_a_change_of_world_still_names_its_world(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, worlds_after_restore, tmp_path / "run", settings()) == [[3, 2]] * 2


def test_a_fault_that_comes_back_after_going_back_stops_the_run(pool: RankPool, tmp_path: Path) -> None:
    sample, _ = poisoned(2)
    config = settings(every="2 steps", nonfinite="rollback")
    texts = pool.run(2, carry_out, tmp_path / "run", config, "auto", -1, (sample, 99))
    assert len(set(texts)) == 1
    assert "rolling back did not help" in texts[0]


AVERAGED = settings(optim={"ema": 0.9, "decay_norms_and_biases": False, "weight_decay": 0.1}, every="1 epoch")


def test_the_average_is_what_is_evaluated_and_what_a_checkpoint_gives(pool: RankPool, tmp_path: Path) -> None:
    _, averaged, *_ = pool.run(1, carry_out, tmp_path / "averaged", AVERAGED)[0]
    plain = settings(optim={"decay_norms_and_biases": False, "weight_decay": 0.1}, every="1 epoch")
    _, without, *_ = pool.run(1, carry_out, tmp_path / "plain", plain)[0]
    assert averaged["metrics"]["loss"] != without["metrics"]["loss"]
    checkpoint = load_checkpoint(tmp_path / "averaged" / "checkpoints" / "step-000008")
    same = load_checkpoint(tmp_path / "plain" / "checkpoints" / "step-000008")
    assert weights_sha256(checkpoint.weights) == weights_sha256(same.weights), "training is as it was"
    _, given = weights_of(tmp_path / "averaged", "last")
    assert weights_sha256(given) == weights_sha256(checkpoint.average)
    assert weights_sha256(given) != weights_sha256(checkpoint.weights)
    statistics = [name for name in given if name.endswith("running_mean")]
    assert statistics
    assert not any(torch.equal(given[name], checkpoint.weights[name]) for name in statistics)
