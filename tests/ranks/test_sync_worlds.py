"""Synchronized batch norm over real processes: equal bits in all worlds, and its errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.cluster.world import World
from samebits.data.order import MicroBatch, Order
from samebits.parallel.reduce import Reducer
from samebits.parallel.tree import push
from tests.ranks import jobs, runs_in_ranks
from tests.ranks.networks import make
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out
from tests.ranks.test_reducer_worlds import MIXED, assert_equal_everywhere
from tests.ranks.test_run_worlds import poisoned


@pytest.mark.parametrize("limits", [{}, MIXED], ids=["one bucket", "many"])
def test_synchronized_batch_norm_gives_the_same_bits_in_all_worlds(pool: RankPool, limits: dict[str, int]) -> None:
    # Steps of 7 micro-batches (4, 4, 4, 4, 4, 3, 3 samples), then one of 4 (15 samples).
    order = Order(num_samples=26 * 2 + 15, global_batch=26, micro_batch=4, seed=2)
    facts, weights, _ = assert_equal_everywhere(pool, (2, 3, 4), "synchronized", order, 4, limits)
    others, other_weights, _ = assert_equal_everywhere(pool, (), "batch norm", order, 4, limits)
    assert facts[0] != others[0]
    assert weights["layers.1.num_batches_tracked"] == other_weights["layers.1.num_batches_tracked"] == 4


def layer_sums(world: World, order: Order) -> list[bytes]:
    """Return the statistics of each micro-batch of a rank, for numbers of very different sizes."""
    model = make("synchronized")
    reducer = Reducer(model, world, synchronized=True)
    (step,) = order.steps(world, stop=1)
    sums = reducer._layer_sums
    assert sums is not None

    def run(micro: MicroBatch) -> bytes:
        with reducer.micro_batch(micro):
            return sums.sum(0, contribution(micro.index), Tensor.clone).numpy().tobytes()

    reducer.begin(step)
    return reducer.run(run)


def contribution(leaf: int) -> Tensor:
    generator = torch.Generator().manual_seed(leaf)
    return torch.randn(17, generator=generator, dtype=torch.float64) * 10.0 ** (leaf % 5)


@pytest.mark.parametrize("num_micro_batches", [3, 4, 7])
def test_sums_inside_of_the_model_are_added_in_the_order_of_the_tree(pool: RankPool, num_micro_batches: int) -> None:
    # The sums are so exact that batch norm would hardly ever show another order: here they are looked at themselves.
    stack: list[tuple[tuple[int, int], Tensor]] = []
    for leaf in range(num_micro_batches):
        push(stack, (leaf, leaf + 1), contribution(leaf), num_micro_batches, torch.add)
    expected = stack[0][1].numpy().tobytes()
    order = Order(num_samples=2 * num_micro_batches, global_batch=20, micro_batch=2)
    for world in (1, 2, 3, 4):
        told = [answer for rank in pool.run(world, layer_sums, order) for answer in rank]
        assert told == [expected] * num_micro_batches


@settings(max_examples=5, deadline=None)
@given(
    world=st.integers(2, 4),
    order=st.builds(Order, st.integers(2, 40), st.integers(2, 40), st.integers(1, 8), st.integers(0, 2**40)),
)
def test_any_cut_gives_the_same_bits(pool: RankPool, world: int, order: Order) -> None:
    # Some ranks have nothing to do, in all steps or in the last one.
    assert_equal_everywhere(pool, (world,), "synchronized", order, min(3, 2 * order.steps_per_epoch), {})


def test_another_cut_gives_the_same_gradient_but_for_rounding(pool: RankPool) -> None:
    found = []
    for micro_batch, world in [(24, 1), (5, 3), (1, 2)]:
        order = Order(num_samples=24, global_batch=24, micro_batch=micro_batch, seed=2)
        found += pool.run(world, jobs.gradient_without_dropout, order)
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_allclose(other[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("special", [0, 3])
def test_ranks_whose_micro_batches_part_ways_all_say_so(pool: RankPool, special: int) -> None:
    order = Order(num_samples=16, global_batch=16, micro_batch=4, seed=2)
    one, two = pool.run(4, jobs.part_ways, order, special)[:2], pool.run(2, jobs.part_ways, order, special)
    here = "rank 0 is at its end" if special == 0 else "rank 0 is at norm, forward"
    assert one[0].startswith(here)
    assert "is at norm, forward" in one[0]
    # With two micro-batches a process, the process that has both kinds detects it alone.
    assert f"micro-batch {special} is at its end" in two[special // 2]


def test_a_synchronized_run_that_is_stopped_resumes(pool: RankPool, tmp_path: Path) -> None:
    # Up to eight micro-batches under way in a process.
    config = runs_in_ranks.settings(batch_norm="sync", micro_batch=2)
    (straight,) = pool.run(1, carry_out, tmp_path / "straight", config)
    assert straight[2]
    with_workers = runs_in_ranks.settings(batch_norm="sync", micro_batch=2, num_workers=1)
    assert pool.run(2, carry_out, tmp_path / "with workers", with_workers) == [straight] * 2
    pool.run(3, carry_out, tmp_path / "run", config, "auto", 4)
    assert pool.run(2, carry_out, tmp_path / "run", config) == [straight] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_of_synchronized_micro_batches_the_bad_one_is_named(pool: RankPool, tmp_path: Path, world: int) -> None:
    sample, micro = poisoned(2)
    config = runs_in_ranks.settings(batch_norm="sync")
    texts = pool.run(world, carry_out, tmp_path / "run", config, "auto", -1, (sample, 99))
    assert len(set(texts)) == 1
    assert f"loss is not finite at step 2 on rank {world - 1}, micro-batch {micro}" in texts[0]
    assert sample in json.loads((tmp_path / "run" / "nonfinite-2.json").read_text())["samples"]
