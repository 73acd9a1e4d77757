"""The sum of a step over real processes: the same bits at any world size, the right gradient, and its messages."""

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.cluster.world import World
from samebits.data.division import Alone
from samebits.data.order import Order
from samebits.parallel import reduce
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.exchange.part import Message
from samebits.parallel.reduce import Reducer
from tests.ranks import jobs
from tests.ranks.networks import make, mean_loss, samples
from tests.ranks.rank_pool import RankPool

WORLDS = (1, 2, 3, 4)
# Buckets of one or two tensors; all of them too large for one round.
MANY_BUCKETS = {"BUCKET_BYTES": 600, "SMALL_BYTES": 0}
IN_ROUNDS = {"DIRECT_SIZE": 1}
MIXED = {"BUCKET_BYTES": 600, "SMALL_BYTES": 1000}
FULL = pytest.mark.full


def assert_equal_everywhere(pool: RankPool, worlds: tuple[int, ...], *arguments: Any) -> tuple[Any, Any, Any]:
    """Run jobs.train in some worlds, and compare every rank of each with the process that is alone.

    Returns:
        Facts, weights, and for each bucket of each world, whether it went in chunks.
    """
    ((facts, weights, _),) = pool.run(1, jobs.train, *arguments)
    in_chunks: list[bool] = []
    for world in worlds:
        results = pool.run(world, jobs.train, *arguments)
        in_chunks += results[-1][-1]
        for rank, (other_facts, other_weights, _) in enumerate(results):
            for step, (one, two) in enumerate(zip(facts, other_facts, strict=True)):
                assert one == two, f"step {step} on rank {rank} of {world}"
            for name, values in weights.items():
                assert values.tobytes() == other_weights[name].tobytes(), f"{name} on rank {rank} of {world}"
    return facts, weights, in_chunks


@pytest.mark.parametrize("machines", [(0, 0, 0, 1), (0, 1, 2, 2), (0, 1, 0, 1)])
def test_the_layout_of_machines_changes_no_bit(pool: RankPool, machines: tuple[int, ...]) -> None:
    order, limits = Order(num_samples=26 * 2 + 15, global_batch=26, micro_batch=4, seed=2), {**MIXED, "FLAT_BYTES": 0}
    (alone,) = pool.run(1, jobs.train, "batch norm", order, 4, limits)
    for each in pool.run(4, jobs.train_on_machines, machines, "batch norm", order, 4, limits):
        assert each[0] == alone[0]
        assert all(each[1][name].tobytes() == values.tobytes() for name, values in alone[1].items())


@pytest.mark.parametrize(
    ("network", "limits"),
    [("batch norm", MIXED), ("gaps", MANY_BUCKETS), ("plain", {})],
    ids=["mixed-batch norm", "chunks-gaps", "one bucket-plain"],
)
def test_gradients_buffers_and_weights_are_one_in_worlds(pool: RankPool, network: str, limits: dict[str, int]) -> None:
    # Steps of 7 micro-batches (4, 4, 4, 4, 4, 3, 3 samples), then one of 4 (15 samples).
    order = Order(num_samples=26 * 2 + 15, global_batch=26, micro_batch=4, seed=2)
    facts, _, in_chunks = assert_equal_everywhere(pool, (2, 3, 4), network, order, 7, limits)
    assert [fact[-1] for fact in facts] == [7.0 * step for step in range(7)]
    if limits:
        assert len(in_chunks) >= 3 * 3
        assert set(in_chunks) == ({True} if limits is MANY_BUCKETS else {True, False})
    else:
        assert in_chunks == [False] * 3


@pytest.mark.parametrize(
    ("network", "limits"),
    [("batch norm", IN_ROUNDS | MANY_BUCKETS), ("gaps", IN_ROUNDS)],
    ids=["many-batch norm", "one bucket-gaps"],
)
def test_an_all_reduce_in_rounds_gives_the_same_bits(pool: RankPool, network: str, limits: dict[str, int]) -> None:
    # Of 3 ranks, one is a guest; in the step of two micro-batches, ranks have none.
    order = Order(num_samples=17, global_batch=12, micro_batch=3, seed=3)
    assert_equal_everywhere(pool, (2, 3, 4), network, order, 4, limits)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 7, pytest.param(8, marks=FULL)])
def test_any_number_of_micro_batches_gives_the_same_bits(pool: RankPool, num_micro_batches: int) -> None:
    order = Order(num_samples=3 * num_micro_batches - 1, global_batch=100, micro_batch=3, seed=num_micro_batches)
    if num_micro_batches == 1:
        order = Order(num_samples=5, global_batch=5, micro_batch=5)
    limits = MIXED if num_micro_batches % 2 else {}
    assert_equal_everywhere(pool, (2, 3, 4), "batch norm", order, 3, limits)


@pytest.mark.parametrize("network", ["batch norm", "gaps", "synchronized"])
@pytest.mark.parametrize("limits", [{}, MANY_BUCKETS], ids=["one bucket", "many"])
def test_steps_of_one_and_two_micro_batches_are_equal(pool: RankPool, network: str, limits: dict[str, int]) -> None:
    # Steps of two micro-batches (4, 4) and of one (3 samples) take turns.
    order = Order(num_samples=11, global_batch=8, micro_batch=5, seed=5)
    assert_equal_everywhere(pool, (2, 3), network, order, 6, limits)


@settings(max_examples=10, deadline=None)
@given(
    world=st.integers(2, 4),
    order=st.builds(Order, st.integers(1, 60), st.integers(1, 40), st.integers(2, 8), st.integers(0, 2**40)),
    network=st.sampled_from(["batch norm", "gaps"]),
    bucket_bytes=st.sampled_from([100, 600, 2000, 10**6]),
    small_bytes=st.sampled_from([0, 200, 700, 2000, 10**6]),
)
def test_any_cut_into_steps_micro_batches_buckets_and_chunks_gives_the_same_bits(
    pool: RankPool, world: int, order: Order, network: str, bucket_bytes: int, small_bytes: int
) -> None:
    limits = {"BUCKET_BYTES": bucket_bytes, "SMALL_BYTES": small_bytes}
    assert_equal_everywhere(pool, (world,), network, order, min(3, 2 * order.steps_per_epoch), limits)


def test_a_parameter_without_a_gradient_has_none_on_any_rank(pool: RankPool) -> None:
    order = Order(num_samples=24, global_batch=24, micro_batch=4, seed=2)
    facts, weights, _ = assert_equal_everywhere(pool, (2, 3, 4), "gaps", order, 4, {})
    untouched = make("gaps").state_dict()
    for _, _, with_gradient, *_ in facts:
        assert not any(name.startswith(("frozen", "unused")) for name in with_gradient)
        assert "first.weight" in with_gradient
    for name in ("frozen.weight", "unused.weight", "unused.bias"):
        assert np.array_equal(weights[name], untouched[name].numpy())
    # Every micro-batch counts from the step's value, so the counter goes up by one a step.
    assert weights["seen"].tolist() == [4, 4, 4]


def test_a_part_used_in_some_micro_batches_only_counts_where_it_is_used(pool: RankPool) -> None:
    inputs, _ = samples(24)
    order = Order(num_samples=24, global_batch=24, micro_batch=4, seed=2)
    (grads, *_), *others = [result for world in (1, 3) for result in pool.run(world, jobs.gradient, "gaps", order)]
    (step,) = order.steps(Alone(), stop=1)
    used = [bool(inputs[micro.indices].sum() > 0) for micro in step.micro_batches]
    assert True in used
    assert False in used
    assert np.abs(grads["sometimes.weight"]).sum() > 0
    assert all(np.array_equal(grads["sometimes.weight"], other["sometimes.weight"]) for other, *_ in others)


@pytest.mark.parametrize("world", [3, 4])
def test_the_gradient_is_that_of_the_mean_over_the_steps_samples(pool: RankPool, world: int) -> None:
    # 9 micro-batches of unequal sizes: 3, 3, ... 2, 2.
    order = Order(num_samples=25, global_batch=25, micro_batch=3, seed=4)
    model, (inputs, labels) = make("plain").double(), samples(25)
    loss = mean_loss(model, inputs.double(), labels)
    loss.backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for grads, mean, norm in pool.run(world, jobs.gradient, "plain", order):
        assert grads.keys() == expected.keys()
        for name, values in grads.items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-7)
        assert mean == pytest.approx(loss.item(), rel=1e-6)
        assert norm == pytest.approx(np.sqrt(sum((values**2).sum() for values in expected.values())), rel=1e-6)


def test_dropout_and_batch_norm_give_the_gradient_of_the_micro_batches_one_by_one(pool: RankPool) -> None:
    order = Order(num_samples=10, global_batch=10, micro_batch=4, seed=4)
    (step,) = order.steps(Alone(), stop=1)
    inputs, labels = samples(10)
    expected: dict[str, torch.Tensor] = {}
    for micro in step.micro_batches:
        model = make("batch norm")
        torch.manual_seed(micro.forward_key)
        mean_loss(model, inputs[micro.indices], labels[micro.indices]).backward()
        for name, parameter in model.named_parameters():
            expected[name] = expected.get(name, 0) + len(micro) / 10 * parameter.grad.double()
    for grads, *_ in pool.run(2, jobs.gradient, "batch norm", order):
        for name, values in grads.items():
            np.testing.assert_allclose(values, expected[name].numpy(), rtol=1e-4, atol=1e-6)


def test_ranks_without_a_micro_batch_take_part_and_end_with_the_same_bits(pool: RankPool) -> None:
    # 2 micro-batches in full steps and 1 in the last: ranks 1, 2 and 3 have nothing to do at times.
    order = Order(num_samples=11, global_batch=8, micro_batch=4, seed=3)
    for limits in ({}, MANY_BUCKETS):
        assert_equal_everywhere(pool, (3, 4), "batch norm", order, 6, limits)


@pytest.mark.parametrize("micro_batch", [4, 14])
def test_the_gradient_is_scaled_and_the_buffers_are_taken_back_on_all_ranks(pool: RankPool, micro_batch: int) -> None:
    order = Order(num_samples=14, global_batch=14, micro_batch=micro_batch, seed=3)
    results = [result for world in WORLDS for result in pool.run(world, jobs.clip_and_undo, order)]
    assert len(set(results)) == 1
    before, changed, undone, norm, scaled = results[0]
    assert before == undone != changed
    assert scaled == pytest.approx(norm / 4, rel=1e-6)


@pytest.mark.parametrize("world", WORLDS)
def test_a_loss_that_is_no_number_is_seen_by_all_ranks_and_the_flag_still_arrives(pool: RankPool, world: int) -> None:
    order = Order(num_samples=20, global_batch=20, micro_batch=4, seed=3)
    assert pool.run(world, jobs.nan_on_one, order, 3) == [(True, True, 1.0)] * world


def handed_over(world: World, limits: dict[str, int]) -> list[list[str]]:
    """For each round of a step, which messages are sends and which receives, in order."""
    rounds = []
    real = tree_all_reduce.post

    def note(world: World, messages: list[Message], *group: dist.ProcessGroup | None) -> list[dist.Work]:
        rounds.append(["receive" if message.is_receive else "send" for message in messages])
        return real(world, messages, *group)

    with patch.object(tree_all_reduce, "post", note):
        jobs.train(world, "plain", Order(24, 12, 2, seed=1), 1, limits)
    return rounds


@pytest.mark.parametrize("limits", [{}, {"SMALL_BYTES": 0}])
def test_receives_go_first_so_that_a_slow_link_carries_both_directions(pool: RankPool, limits: dict[str, int]) -> None:
    for rounds in pool.run(3, handed_over, limits):
        assert rounds
        for messages in rounds:
            assert messages == sorted(messages)  # "receive" < "send"
            assert {"receive", "send"} == set(messages)


def summed_before_reduce(world: World, machines: tuple[int, ...]) -> bool:
    """Whether the first of several buckets is summed over all ranks before `reduce`, without a call of this thread."""
    with patch.object(reduce, "BUCKET_BYTES", 600):
        model, (inputs, labels) = jobs.make("plain"), jobs.samples(24)
        reducer = Reducer(model, replace(world, machines=machines))
        (step,) = Order(24, 24, 4, seed=2).steps(world, stop=1)
        reducer.begin(step)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                reducer.backward(jobs.mean_loss(model, inputs[micro.indices], labels[micro.indices]))
        end = time.monotonic() + (20.0 if machines else 0.3)
        while (bucket := reducer._sum.buckets[0]).result is None and time.monotonic() < end:
            time.sleep(0.01)
        found = bucket.result is not None
        reducer.reduce()
    return found


@pytest.mark.parametrize(("machines", "is_early"), [((0, 1), True), ((), False)])
def test_between_machines_a_bucket_is_summed_before_reduce(
    pool: RankPool, machines: tuple[int, ...], is_early: bool
) -> None:
    assert pool.run(2, summed_before_reduce, machines) == [is_early] * 2
