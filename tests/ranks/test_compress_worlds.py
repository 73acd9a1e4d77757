"""Compressed gradients over real processes: equal in 16 bits at any world size."""

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
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.reduce import Reducer
from tests.ranks import runs_in_ranks
from tests.ranks.networks import make, mean_loss, samples
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out, settings


def gradients(world: World, compress: str, exact: bool, num_steps: int, limits: dict[str, int]) -> Any:
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
def test_in_16_bits_all_worlds_have_one_near_gradient(pool: RankPool, name: str, limits: dict[str, int]) -> None:
    (((plain,), _, flag, extras),) = pool.run(1, gradients, "none", True, 1, {})
    (((alone,), *_),) = pool.run(1, gradients, name, True, 1, {})
    assert not np.array_equal(alone, plain)
    assert np.linalg.norm(alone - plain) <= 0.01 * np.linalg.norm(plain)
    for world in (2, 3, 4):
        for (grad,), _, theirs, theirs_extras in pool.run(world, gradients, name, True, 1, limits):
            assert np.array_equal(grad, alone)
            assert (theirs, theirs_extras) == (flag, extras)  # figures are never rounded


def test_in_16_bits_half_of_the_bytes_are_sent(pool: RankPool) -> None:
    whole, half = (pool.run(2, gradients, name, True, 1, {"SMALL_BYTES": 0})[0][1] for name in ("none", "bf16"))
    assert half < 0.6 * whole


def test_a_sum_too_large_for_fp16_is_named_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    config = settings(compress="fp16")
    texts = pool.run(2, carry_out_with_a_large_loss, tmp_path / "run", config)
    assert len(set(texts)) == 1
    assert "exceeds 65,504, the largest number of compress=fp16" in texts[0]


def carry_out_with_a_large_loss(world: World, *arguments: Any) -> Any:
    real = runs_in_ranks.loss
    with patch.object(runs_in_ranks, "loss", lambda *given: {"cross_entropy": 1e7 * real(*given)["cross_entropy"]}):
        return carry_out(world, *arguments)
