"""A model that is sharded by whole tensors trains to the bits of a replicated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samebits.storage.checkpoint import load_checkpoint
from tests.ranks.networks import Sometimes
from tests.ranks.rank_pool import RankPool, new_pool
from tests.ranks.runs_in_ranks import settings
from tests.ranks.sharded_in_ranks import carry_out, carry_out_within, hash_of
from tests.ranks.test_run_worlds import poisoned

FULL = pytest.mark.full
OPTIMIZERS = {
    "sgd": {"weight_decay": 0.01},
    "adamw": {"name": "adamw", "weight_decay": 0.1, "decay_norms_and_biases": False, "ema": 0.9},
}


def ddp(**more: Any) -> Any:
    return settings(**more)


def fsdp(**more: Any) -> Any:
    return settings(parallel="fsdp", **more)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert not isinstance(ours, str), ours
    assert hash_of(ours[0]) == hash_of(theirs[0])
    for name in ("metrics", "num_samples", "step", "loss_scale"):
        assert ours[1][name] == theirs[1][name], name


# A step's micro-batches are 6, 6, 6 and 2: at three and four processes some have fewer than others, or none.
@pytest.mark.parametrize(
    ("world", "optim", "precision"),
    [
        (2, "adamw", "fp32"),
        (3, "sgd", "bf16"),
        *(
            pytest.param(world, optim, precision, marks=FULL)
            for world in (1, 2, 3, 4)
            for optim in OPTIMIZERS
            for precision in ("fp32", "bf16")
            if (world, optim, precision) not in ((2, "adamw", "fp32"), (3, "sgd", "bf16"))
        ),
    ],
)
def test_its_weights_have_the_bits_of_ddp(
    pool: RankPool, tmp_path: Path, world: int, optim: str, precision: str
) -> None:
    more = {"optim": OPTIMIZERS[optim], "precision": precision}
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(**more))
    first, *others = pool.run(world, carry_out, tmp_path / "fsdp", fsdp(**more))
    assert_same_bits(first, expected)
    assert all(other[0] == {} and other[1]["metrics"] == first[1]["metrics"] for other in others)


@FULL
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
        pytest.param((2, fsdp), (3, fsdp), marks=FULL),
        pytest.param((3, fsdp), (2, ddp), marks=FULL),
        pytest.param((2, fsdp), (1, fsdp), marks=FULL),
    ],
)
def test_it_resumes_at_another_world_size_and_from_ddp_to_the_same_bits(
    pool: RankPool, tmp_path: Path, before: Any, then: Any
) -> None:
    optim = {"name": "adam", "ema": 0.9}
    (expected,) = pool.run(1, carry_out, tmp_path / "straight", ddp(optim=optim))
    (size, kind), (next_size, next_kind) = before, then
    pool.run(size, carry_out, tmp_path / "run", kind(optim=optim), 5)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "step-000006").weights["layers.0.0.weight"].shape == (
        8, 3, 3, 3,
    )  # fmt: skip
    assert_same_bits(pool.run(next_size, carry_out, tmp_path / "run", next_kind(optim=optim))[0], expected)


@FULL
def test_parts_used_in_some_micro_batches_only_have_the_bits_of_ddp(pool: RankPool, tmp_path: Path) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(), -1, None, Sometimes)
    for world in (2, 3):
        first = pool.run(world, carry_out, tmp_path / str(world), fsdp(), -1, None, Sometimes)[0]
        assert_same_bits(first, expected)


@FULL
@pytest.mark.parametrize(
    "more",
    [
        {"activation_checkpointing": ("layers.0",)},
        {"precision": "fp16", "loss_scale": 1024.0},
        {"micro_batch": 1},
    ],
)
def test_other_settings_have_the_bits_of_ddp(pool: RankPool, tmp_path: Path, more: Any) -> None:
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(**more))
    assert_same_bits(pool.run(2, carry_out, tmp_path / "fsdp", fsdp(**more))[0], expected)


@FULL
def test_a_step_that_is_not_finite_is_named_and_can_be_gone_back_for(pool: RankPool, tmp_path: Path) -> None:
    sample, micro = poisoned(2)
    (expected,) = pool.run(1, carry_out, tmp_path / "ddp", ddp(every="2 steps"))
    config = fsdp(every="2 steps", nonfinite="rollback")
    assert_same_bits(pool.run(2, carry_out, tmp_path / "back", config, -1, (sample, 2))[0], expected)
    texts = pool.run(2, carry_out, tmp_path / "stop", fsdp(), -1, (sample, 99))
    assert len(set(texts)) == 1
    assert f"loss is not finite at step 2 on rank {micro % 2}, micro-batch {micro}" in texts[0]


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
