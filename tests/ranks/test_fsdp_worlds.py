"""A sharded model trains to the bits of a replicated one. Its checkpoints fit both."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from samebits.cluster.world import World
from samebits.engine import progress as run_progress
from samebits.storage.checkpoint import load_checkpoint, steps
from tests.ranks.networks import Sometimes, WithGaps
from tests.ranks.rank_pool import RankPool, new_pool
from tests.ranks.recipes_in_ranks import carry_out as train_pose
from tests.ranks.recipes_in_ranks import pose as pose_settings
from tests.ranks.runs_in_ranks import settings
from tests.ranks.sharded_in_ranks import carry_out, carry_out_within, hash_of, started
from tests.ranks.test_run_worlds import poisoned

FULL = pytest.mark.full
SGD = {"weight_decay": 0.01}
ADAMW = {"name": "adamw", "weight_decay": 0.1, "decay_norms_and_biases": False, "ema": 0.9}


def fsdp(**more: Any) -> Any:
    return settings(parallel="fsdp", **more)


def ddp(**more: Any) -> Any:
    return settings(**more)


def assert_same(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    assert hash_of(ours[0]) == hash_of(theirs[0])
    for name in ("metrics", "num_samples", "step", "loss_scale"):
        assert ours[1][name] == theirs[1][name], name


# A step's micro-batches are 6, 6, 6 and 2: at three and four processes some have fewer than others, or none.
@pytest.mark.parametrize(
    ("world", "optim", "precision"),
    [
        pytest.param(1, SGD, "bf16", marks=FULL),
        (2, ADAMW, "fp32"),
        (3, SGD, "bf16"),
        pytest.param(4, ADAMW, "bf16", marks=FULL),
    ],
)
def test_weights_are_ddp_s(pool: RankPool, tmp_path: Path, world: int, optim: Any, precision: str) -> None:
    more = {"optim": optim, "precision": precision}
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(**more))
    first, *others = pool.run(world, carry_out, tmp_path / "fsdp", fsdp(**more))
    assert_same(first, expected)
    assert all(other[0] == {} and other[1]["metrics"] == first[1]["metrics"] for other in others)


@FULL
@pytest.mark.parametrize(
    "more",
    [{"activation_checkpointing": ("layers.0",)}, {"precision": "fp16", "loss_scale": 1024.0}, {"micro_batch": 1}],
)
def test_other_settings_have_the_bits_of_ddp(pool: RankPool, tmp_path: Path, more: Any) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(**more))
    assert_same(pool.run(2, carry_out, tmp_path / "fsdp", fsdp(**more))[0], expected)


def test_each_tensor_is_whole_on_one_rank(pool: RankPool, tmp_path: Path) -> None:
    (whole,) = pool.run(1, carry_out, tmp_path / "ddp", ddp())
    parts = pool.run(3, carry_out, tmp_path / "fsdp", fsdp())
    for name, shape in whole[3].items():
        if "running" not in name and "tracked" not in name:
            assert sorted(held[3][name] for held in parts) == [(0, *shape[1:]), (0, *shape[1:]), shape]
    # The optimizer has momentum for the same tensors.
    num_values = [sum(int(np.prod(shape)) for shape in held[4]) for held in parts]
    assert sum(num_values) == sum(int(np.prod(shape)) for shape in whole[4])
    assert max(num_values) < 0.6 * sum(num_values)


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ((1, ddp), (2, fsdp)),
        ((2, fsdp), (2, fsdp)),
        pytest.param((2, fsdp), (3, fsdp), marks=FULL),
        ((3, fsdp), (2, ddp)),
    ],
)
def test_its_checkpoints_resume_at_another_world_size_and_as_ddp(
    pool: RankPool, tmp_path: Path, before: Any, then: Any
) -> None:
    optim = {"name": "adam", "ema": 0.9}
    (expected,) = pool.run(1, carry_out, tmp_path / "straight", ddp(optim=optim))
    (size, kind), (next_size, next_kind) = before, then
    pool.run(size, carry_out, tmp_path / "run", kind(optim=optim), 5)
    saved = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000006")
    assert saved.weights["layers.0.0.weight"].shape == (8, 3, 3, 3)
    result = pool.run(next_size, carry_out, tmp_path / "run", next_kind(optim=optim))[0]
    assert_same(result, expected)


@FULL
def test_a_truncated_checkpoint_is_passed_over(pool: RankPool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(2, carry_out, run, fsdp(), 4)
    torn = run / "checkpoints" / f"step-{steps(run / 'checkpoints')[-1]:06}" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    assert f"{torn} is truncated" in pool.run(2, carry_out, run, fsdp())[0][2][0]


def test_a_loss_that_is_not_finite_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    sample, micro = poisoned(5)
    pool.run(2, carry_out, tmp_path / "run", fsdp(every="2 steps"), 3)
    texts = pool.run(2, carry_out, tmp_path / "run", fsdp(every="2 steps"), -1, (sample, 99))
    assert len(set(texts)) == 1
    assert f"loss is not finite at step 5 on rank 1, micro-batch {micro}" in texts[0]
    assert "checkpoint of step 4 is whole" in texts[0]


@FULL
def test_a_step_that_is_not_finite_is_named_and_can_be_gone_back_for(pool: RankPool, tmp_path: Path) -> None:
    sample, micro = poisoned(2)
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(every="2 steps"))
    config = fsdp(every="2 steps", nonfinite="rollback")
    assert_same(pool.run(2, carry_out, tmp_path / "back", config, -1, (sample, 2))[0], expected)
    texts = pool.run(2, carry_out, tmp_path / "stop", fsdp(), -1, (sample, 99))
    assert len(set(texts)) == 1
    assert f"loss is not finite at step 2 on rank 1, micro-batch {micro}" in texts[0]


def carry_out_from_a_large_scale(world: World, *arguments: Any) -> Any:
    with patch.object(run_progress, "INIT_SCALE", 2.0**20):
        return carry_out(world, *arguments)


@FULL
def test_overflows_of_a_dynamic_loss_scale_are_agreed_and_survive_a_stop(pool: RankPool, tmp_path: Path) -> None:
    config = fsdp(precision="fp16", every="2 steps")
    straight, other = pool.run(2, carry_out_from_a_large_scale, tmp_path / "straight", config)
    progress = straight[1]
    assert 0 < progress["num_overflows"] < 8
    assert progress["loss_scale"] == other[1]["loss_scale"] == 2.0 ** (20 - progress["num_overflows"])
    pool.run(2, carry_out_from_a_large_scale, tmp_path / "stopped", config, 1)
    resumed, _ = pool.run(2, carry_out, tmp_path / "stopped", config)
    assert resumed[1]["num_overflows"] == progress["num_overflows"]
    assert hash_of(resumed[0]) == hash_of(straight[0])


def test_parts_used_in_some_micro_batches_and_lstms_are_summed(pool: RankPool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(), -1, None, Sometimes)
    for world in (2, 3):
        result = pool.run(world, carry_out, tmp_path / str(world), fsdp(), -1, None, Sometimes)[0]
        assert_same(result, expected)


@FULL
def test_an_evaluation_of_pictures_one_by_one_ends_for_any_number_of_them(pool: RankPool, tmp_path: Path) -> None:
    # Batches of 2 would be 2 and 2 pictures for one rank, and 2 and 1 for the other.
    config = pose_settings(parallel="fsdp", data={"num_eval": 7, "num_train": 6}).model_copy(update={"epochs": 1})
    first, second = pool.run(2, train_pose, tmp_path / "run", config)
    assert first[1] == second[1]


def test_parameters_that_two_layers_share_are_refused(pool: RankPool, tmp_path: Path) -> None:
    for text in pool.run(2, carry_out, tmp_path / "run", fsdp(), -1, None, WithGaps):
        assert "tied.weight is the same parameter as head.weight" in text


@FULL
def test_a_model_whose_training_state_one_process_may_not_hold_trains_on_two(tmp_path: Path) -> None:
    num_parameters = 16 * 1000 * 1000 + 193 * 1000 + 5005
    room = int(0.9 * 4 * 4 * num_parameters)  # weights, gradients, adam's two averages: all but a tenth
    more = {"optim": {"name": "adam"}, "every": "99 steps", "micro_batch": 8}
    with new_pool(2) as pool:
        texts = pool.run(2, carry_out_within, tmp_path / "ddp", ddp(**more), room)
    assert all(isinstance(text, str) for text in texts)
    assert any("can't allocate memory" in text for text in texts)
    with new_pool(2) as pool:
        assert pool.run(2, carry_out_within, tmp_path / "fsdp", fsdp(**more), room) == [3, 3]
    saved = load_checkpoint(tmp_path / "fsdp" / "checkpoints" / "step-000003")
    assert sum(tensor.numel() for tensor in saved.weights.values()) == num_parameters


def test_what_a_recipe_starts_from_comes_to_all_ranks_parts(pool: RankPool) -> None:
    first, second = pool.run(2, started, fsdp(optim={"ema": 0.9}))
    assert first == ({"weights": "two"}, [{2.0}, {2.0}])
    assert second == ({"weights": "two"}, [])
