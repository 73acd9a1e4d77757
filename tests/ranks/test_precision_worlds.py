"""Runs in 16 bits over real processes: the same weights, loss scale, overflows and sums in all worlds."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.order import MicroBatch, Order
from samebits.engine import progress as run_progress
from samebits.module.precision import use_precision
from samebits.parallel.reduce import Reducer
from tests.ranks import runs_in_ranks
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out


def carry_out_from_scale(world: World, scale: float, floor: float, *arguments: Any) -> Any:
    """A run whose dynamic loss scale begins and ends elsewhere."""
    with patch.object(run_progress, "INIT_SCALE", scale), patch.object(run_progress, "MIN_SCALE", floor):
        return carry_out(world, *arguments)


class Tied(nn.Module):
    """One layer before and after a batch norm: in bf16 the sum of its two gradients rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(self.norm(self.layer(inputs)))
        return outputs


def gradient_of_tied(world: World, order: Order) -> bytes:
    """The gradient of the layer that is used twice, after one synchronized step in bf16."""
    torch.manual_seed(0)
    model, inputs = Tied(), torch.randn(order.num_samples, 16)
    use_precision(model, runs_in_ranks.settings(precision="bf16", batch_norm="sync"), world.device)
    reducer = Reducer(model, world, synchronized=True)
    (step,) = order.steps(world, stop=1)

    def run(micro: MicroBatch) -> None:
        with reducer.micro_batch(micro):
            reducer.backward(model(inputs[micro.indices]).square().mean())

    reducer.begin(step)
    reducer.run(run)
    reducer.reduce()
    return model.layer.weight.grad.numpy().tobytes()


def test_a_layer_used_twice_gets_the_same_gradient_whatever_else_is_under_way(pool: RankPool) -> None:
    order = Order(num_samples=32, global_batch=32, micro_batch=8)
    found = [answer for world in (1, 2, 4) for answer in pool.run(world, gradient_of_tied, order)]
    assert len(set(found)) == 1


def every_second(**more: Any) -> RunConfig:
    return runs_in_ranks.settings(every="2 steps", **more)


def test_overflows_are_agreed_counted_and_survive_a_stop(pool: RankPool, tmp_path: Path) -> None:
    config = every_second(precision="fp16")
    (straight,) = pool.run(1, carry_out_from_scale, 2.0**20, 1.0, tmp_path / "straight", config)
    progress = straight[1]
    assert straight[2]
    assert 0 < progress["num_overflows"] < 8
    assert progress["loss_scale"] == 2.0 ** (20 - progress["num_overflows"])
    assert progress["skipped"] == []
    assert progress["num_samples"] < 2 * runs_in_ranks.NUM_SAMPLES
    for world in (2, 4):
        assert pool.run(world, carry_out_from_scale, 2.0**20, 1.0, tmp_path / str(world), config) == [straight] * world
    # Stopped in the middle of the overflows, the scale comes from the checkpoint.
    pool.run(2, carry_out_from_scale, 2.0**20, 1.0, tmp_path / "stopped", config, "auto", 1)
    assert pool.run(3, carry_out, tmp_path / "stopped", config) == [straight] * 3


@pytest.mark.parametrize("loss_scale", ["dynamic", 2.0**24])
def test_an_overflow_that_no_scale_cures_goes_the_way_of_watch(pool: RankPool, tmp_path: Path, loss_scale: Any) -> None:
    config = every_second(precision="fp16", loss_scale=loss_scale)
    texts = pool.run(2, carry_out_from_scale, 2.0**24, 2.0**24, tmp_path / "run", config)
    assert len(set(texts)) == 1
    assert "gradient is not finite at step 0 on rank 0, micro-batch 0" in texts[0]


def test_a_sample_that_is_not_a_number_is_no_overflow(pool: RankPool, tmp_path: Path) -> None:
    texts = pool.run(2, carry_out, tmp_path / "run", every_second(precision="fp16"), "auto", -1, (7, 99))
    assert len(set(texts)) == 1
    assert "loss is not finite at step" in texts[0]
