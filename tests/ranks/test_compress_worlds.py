"""Compressed gradients over real processes: equal in 16 bits at any world size, near enough by PowerSGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.parallel import reduce
from samebits.parallel.compress import Compression
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.reduce import Reducer
from tests.ranks import runs_in_ranks
from tests.ranks.networks import make, mean_loss, samples
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out, settings


def gradients(world: World, compress: Compression, exact: bool, num_steps: int, limits: dict[str, int]) -> Any:
    """The gradients of some steps with weights that stay, and the bytes that this rank sent point to point."""
    sent = 0
    real = tree_all_reduce.post

    def count(world: World, messages: list[tree_all_reduce.Message]) -> list[dist.Work]:
        nonlocal sent
        sent += sum(message.values.nbytes for message in messages if not message.is_receive)
        return real(world, messages)

    order = Order(16, 16, 2, seed=1)
    with (
        patch.object(tree_all_reduce, "post", count),
        patch.object(reduce, "BUCKET_BYTES", limits.get("BUCKET_BYTES", reduce.BUCKET_BYTES)),
        patch.object(tree_all_reduce, "SMALL_BYTES", limits.get("SMALL_BYTES", tree_all_reduce.SMALL_BYTES)),
    ):
        model, (inputs, labels) = make("plain"), samples(order.num_samples)
        reducer = Reducer(model, world, exact=exact, num_extras=1, compress=compress)
        found = []
        for step in order.steps(world, stop=num_steps):
            reducer.begin(step)
            for micro in step.micro_batches:
                with reducer.micro_batch(micro):
                    loss = mean_loss(model, inputs[micro.indices], labels[micro.indices])
                    reducer.backward(loss, loss.view(1))
            reducer.reduce(flag=3.0)
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).numpy().copy())
    return found, sent, reducer.flag, reducer.extras


@pytest.mark.parametrize("limits", [{}, {"BUCKET_BYTES": 1000, "SMALL_BYTES": 0}])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_in_16_bits_all_worlds_have_one_gradient_near_the_whole_one(
    pool: RankPool, name: str, limits: dict[str, int]
) -> None:
    (((plain,), _, flag, extras),) = pool.run(1, gradients, Compression(), True, 1, {})
    (((alone,), *_),) = pool.run(1, gradients, Compression(name), True, 1, {})
    assert not np.array_equal(alone, plain)
    assert np.linalg.norm(alone - plain) <= 0.01 * np.linalg.norm(plain)
    for world in (2, 3, 4):
        for (grad,), _, theirs, theirs_extras in pool.run(world, gradients, Compression(name), True, 1, limits):
            assert np.array_equal(grad, alone)
            assert (theirs, theirs_extras) == (flag, extras)  # figures are never rounded


def test_in_16_bits_half_of_the_bytes_are_sent(pool: RankPool) -> None:
    whole, half = (
        pool.run(2, gradients, Compression(name), True, 1, {"SMALL_BYTES": 0})[0][1] for name in ("none", "bf16")
    )
    assert half < 0.6 * whole


def test_powersgd_feeds_back_what_it_left_out_so_that_the_sum_over_steps_is_whole(pool: RankPool) -> None:
    steps = 12
    (plain, whole, *_), _ = pool.run(2, gradients, Compression(), False, steps, {})
    (grads, sent, flag, _), other = pool.run(2, gradients, Compression("powersgd", 1), False, steps, {})
    assert all(map(np.array_equal, grads, other[0]))
    assert flag == 3.0
    assert sent < whole / 2
    first = np.linalg.norm(grads[0] - plain[0]) / np.linalg.norm(plain[0])
    summed = np.linalg.norm(sum(grads) - sum(plain)) / np.linalg.norm(sum(plain))
    assert first > 0.02  # one step alone is off
    assert summed < first / 3


def test_powersgd_is_equal_but_for_rounding_in_all_worlds(pool: RankPool) -> None:
    ((alone, *_),) = pool.run(1, gradients, Compression("powersgd", 1), False, 3, {})
    for world in (2, 4):
        (grads, *_), *_ = pool.run(world, gradients, Compression("powersgd", 1), False, 3, {})
        for one, other in zip(alone, grads, strict=True):
            assert np.linalg.norm(one - other) <= 1e-3 * np.linalg.norm(one)


@pytest.mark.parametrize("batch_norm", [pytest.param("micro", marks=pytest.mark.full), "sync"])
def test_a_run_in_bf16_gradients_has_one_hash_in_all_worlds_and_after_a_stop(
    pool: RankPool, tmp_path: Path, batch_norm: str
) -> None:
    config = settings(every="2 steps", compress="bf16", batch_norm=batch_norm)
    (straight,) = pool.run(1, carry_out, tmp_path / "straight", config)
    assert straight[2]
    assert pool.run(4, carry_out, tmp_path / "four", config) == [straight] * 4
    pool.run(3, carry_out, tmp_path / "stopped", config, "auto", 4)
    assert pool.run(2, carry_out, tmp_path / "stopped", config) == [straight] * 2


def test_a_powersgd_run_continues_after_a_stop_and_after_a_non_finite_step(pool: RankPool, tmp_path: Path) -> None:
    config = settings(every="2 steps", compress="powersgd", mode="fast", nonfinite="skip")
    pool.run(2, carry_out, tmp_path / "run", config, "auto", 4)
    found = pool.run(2, carry_out, tmp_path / "run", config, "auto", -1, (7, 1))
    assert found[0] == found[1]
    assert found[0][2]
    assert len(found[0][1]["skipped"]) == 1
    assert np.isfinite(found[0][1]["metrics"]["loss"])


def test_powersgd_is_refused_in_exact_mode() -> None:
    with pytest.raises(ValueError, match="Set mode=fast, or compress=bf16"):
        settings(compress="powersgd")


def test_a_sum_too_large_for_fp16_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    config = settings(compress="fp16")
    texts = pool.run(2, carry_out_with_a_large_loss, tmp_path / "run", config)
    assert len(set(texts)) == 1
    assert "exceeds 65,504, the largest number of compress=fp16" in texts[0]


def carry_out_with_a_large_loss(world: World, *arguments: Any) -> Any:
    real = runs_in_ranks.loss
    with patch.object(runs_in_ranks, "loss", lambda *given: {"cross_entropy": 1e7 * real(*given)["cross_entropy"]}):
        return carry_out(world, *arguments)
