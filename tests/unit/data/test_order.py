"""The order of samples, their keys, and their division over ranks."""

import itertools
import math
import random
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data import order as order_module
from samebits.data.division import Alone, Division, num_micro_batches, part
from samebits.data.keyed import FORWARD, ORDER, SAMPLE, key, keys, mix, mix_array, uniform, uniforms
from samebits.data.order import MicroBatch, Order, Step, permute
from samebits.data.seeding import seeded


@dataclass(frozen=True)
class Seat:
    rank: int
    size: int
    machines: tuple[int, ...] = ()


orders = st.builds(
    Order,
    num_samples=st.integers(1, 200),
    global_batch=st.integers(1, 40),
    micro_batch=st.integers(1, 24),
    seed=st.integers(0, 2**63 - 1),
)
worlds = st.integers(1, 9)
many = settings(max_examples=40, deadline=None)


def plain(micro_batch: MicroBatch) -> tuple[Any, ...]:
    """All that a micro-batch is, comparable."""
    return (
        micro_batch.step,
        micro_batch.epoch,
        micro_batch.index,
        micro_batch.indices.tolist(),
        micro_batch.keys.tolist(),
        micro_batch.weight,
        micro_batch.forward_key,
    )


def run(order: Order, world: int, start: int, stop: int) -> list[list[MicroBatch]]:
    """For each step, the micro-batches of all ranks of a world, rank by rank."""
    ranks = [list(order.steps(Seat(rank, world), start=start, stop=stop)) for rank in range(world)]
    assert {len(steps) for steps in ranks} == {stop - start}
    return [[micro for step in steps for micro in step.micro_batches] for steps in zip(*ranks, strict=True)]


@many
@given(order=orders, world=worlds, epoch=st.integers(0, 3))
def test_every_sample_comes_once_an_epoch(order: Order, world: int, epoch: int) -> None:
    first = epoch * order.steps_per_epoch
    steps = run(order, world, first, first + order.steps_per_epoch)
    seen = [index for micros in steps for micro in micros for index in micro.indices.tolist()]
    assert sorted(seen) == list(range(order.num_samples))
    assert {micro.epoch for micros in steps for micro in micros} == {epoch}


@many
@given(order=orders, world=worlds)
def test_weights_of_a_step_add_up_to_one(order: Order, world: int) -> None:
    for micros in run(order, world, 0, order.steps_per_epoch):
        num_samples = sum(len(micro) for micro in micros)
        assert math.fsum(micro.weight for micro in micros) == pytest.approx(1, abs=1e-12)
        assert all(micro.weight == len(micro) / num_samples for micro in micros)


@many
@given(order=orders, world=worlds)
def test_a_step_is_cut_evenly_into_as_few_micro_batches_as_can_be(order: Order, world: int) -> None:
    steps = run(order, world, 0, order.steps_per_epoch)
    sizes = [sum(len(micro) for micro in micros) for micros in steps]
    assert sizes[:-1] == [order.global_batch] * (len(sizes) - 1)
    assert 1 <= sizes[-1] <= order.global_batch
    for size, micros in zip(sizes, steps, strict=True):
        lengths = [len(micro) for micro in micros]
        assert len(lengths) == math.ceil(size / order.micro_batch)
        assert max(lengths) <= order.micro_batch
        assert max(lengths) - min(lengths) <= 1


@many
@given(order=orders, world=worlds, num_epochs=st.integers(1, 2))
def test_the_world_changes_no_micro_batch(order: Order, world: int, num_epochs: int) -> None:
    stop = num_epochs * order.steps_per_epoch
    alone, together = run(order, 1, 0, stop), run(order, world, 0, stop)
    for whole, shared in zip(alone, together, strict=True):
        assert [plain(micro) for micro in whole] == [plain(micro) for micro in shared]
        assert [micro.index for micro in shared] == list(range(len(shared)))


@many
@given(order=orders, before=worlds, after=worlds, data=st.data())
def test_a_resume_at_another_world_repeats_and_leaves_out_nothing(
    order: Order, before: int, after: int, data: st.DataObject
) -> None:
    stop = 2 * order.steps_per_epoch
    at = data.draw(st.integers(0, stop))
    whole = run(order, 1, 0, stop)
    stopped_and_resumed = run(order, before, 0, at) + run(order, after, at, stop)
    assert [[plain(micro) for micro in step] for step in whole] == [
        [plain(micro) for micro in step] for step in stopped_and_resumed
    ]


@many
@given(order=orders, world=worlds, rank=st.integers(0, 8))
def test_a_process_knows_what_every_rank_runs(order: Order, world: int, rank: int) -> None:
    mine = rank % world
    shares: dict[int, list[Step]] = {
        peer: list(order.steps(Seat(peer, world), stop=order.steps_per_epoch)) for peer in range(world)
    }
    for number, step in enumerate(shares[mine]):
        assert (step.number, len(step.leaves)) == (number, world)
        for peer in range(world):
            theirs = shares[peer][number]
            assert [micro.index for micro in theirs.micro_batches] == [*step.leaves[peer]]
            assert theirs.num_micro_batches == step.num_micro_batches
            assert theirs.num_samples == step.num_samples


@many
@given(order=orders, world=worlds, window=st.integers(1, 50))
def test_how_many_steps_are_planned_at_once_changes_nothing(order: Order, world: int, window: int) -> None:
    stop = 2 * order.steps_per_epoch
    usual = run(order, world, 0, stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "WINDOW", window)
        other = run(order, world, 0, stop)
    assert [[plain(m) for m in step] for step in usual] == [[plain(m) for m in step] for step in other]


@many
@given(start=st.integers(0, 1000), length=st.integers(0, 1000), num_parts=st.integers(1, 40))
def test_parts_follow_each_other_and_differ_by_one_at_most(start: int, length: int, num_parts: int) -> None:
    parts = [part(start, start + length, num_parts, index) for index in range(num_parts)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    lengths = [last - first for first, last in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(max_examples=80, deadline=None)
@given(num_samples=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_permute_gives_each_sample_once(num_samples: int, key: int) -> None:
    order = permute(np.arange(num_samples), num_samples, key)
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(max_examples=100, deadline=None)
@given(num_samples=st.integers(1, 10**9), key=st.integers(0, 2**64 - 1), data=st.data())
def test_permute_gives_a_position_the_same_sample_whatever_else_is_asked(
    num_samples: int, key: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20)))
    together = permute(positions, num_samples, key)
    assert together.min() >= 0
    assert together.max() < num_samples
    assert together.tolist() == [int(permute(positions[i : i + 1], num_samples, key)[0]) for i in range(len(positions))]


@pytest.mark.parametrize(
    ("num_samples", "first"),
    [(3, [2, 0, 1]), (100, [86, 85, 8, 52]), (4096, [209, 4011, 950, 1903]), (4097, [3037, 4011, 2135, 264])],
)
def test_an_order_is_the_same_in_all_versions(num_samples: int, first: list[int]) -> None:
    assert permute(np.arange(num_samples)[:4], num_samples, 2026).tolist() == first


def chi_square(counts: np.ndarray[Any, Any], degrees: int) -> float:
    """Probability that fair chance gives counts at least this uneven."""
    from scipy.stats import chi2

    expected = counts.sum() / counts.size
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), degrees))


@pytest.mark.full
def test_all_orders_of_three_samples_are_equally_likely() -> None:
    places = {order: place for place, order in enumerate(itertools.permutations(range(3)))}
    counts = np.zeros(6)
    for number in range(300):
        first, second, third = permute(np.arange(3), 3, number).tolist()
        counts[places[first, second, third]] += 1
    assert chi_square(counts, 5) > 1e-3, counts


@pytest.mark.parametrize("num_samples", [pytest.param(7, marks=pytest.mark.full), 100, 256, 257])
def test_every_sample_is_equally_likely_at_every_position(num_samples: int) -> None:
    counts = np.zeros((num_samples, num_samples))
    positions = np.arange(num_samples)
    for number in range(300):
        counts[positions, permute(positions, num_samples, number)] += 1
    # Rows and columns have fixed sums.
    assert chi_square(counts, (num_samples - 1) ** 2) > 1e-3


def test_neighbors_in_the_order_are_not_related() -> None:
    num_samples = 1000
    counts = np.zeros(num_samples - 1)
    for number in range(60):
        order = permute(np.arange(num_samples), num_samples, number)
        np.add.at(counts, np.diff(order) % num_samples - 1, 1)
    assert chi_square(counts, num_samples - 2) > 1e-3


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(1000)
    some = [Order(1000, 10, 10, seed).indices(epoch, positions) for seed in range(10) for epoch in range(10)]
    for left, right in itertools.combinations(some, 2):
        # Two random orders agree at one position on average.
        assert (left == right).sum() < 10


def test_one_process_of_a_thousand_holds_no_list_of_a_hundred_million_samples() -> None:
    order = Order(num_samples=100_000_000, global_batch=8192, micro_batch=8, seed=1)
    next(order.steps(Seat(0, 1024), start=5, stop=6))
    tracemalloc.start()
    steps = list(order.steps(Seat(700, 1024), start=12_000, stop=12_010))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(step.micro_batches[0]) for step in steps] == [8] * 10
    assert peak < 2_000_000


@pytest.mark.parametrize("name", ["num_samples", "global_batch", "micro_batch"])
def test_an_order_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, it must be at least 1"):
        Order(**{"num_samples": 10, "global_batch": 4, "micro_batch": 2, name: 0})


NUM_RANKS = 4


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    machines: tuple[int, ...] = ()


@settings(max_examples=40)
@given(st.lists(st.integers(0, NUM_RANKS - 1), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 9))
def test_a_dealt_step_has_each_sample_once_with_its_own_key(owners: list[int], micro_batch: int, number: int) -> None:
    size = len(owners) * micro_batch
    order = Order(2 * size, size, micro_batch)
    dealt = tuple(tuple(leaf for leaf, owner in enumerate(owners) if owner == rank) for rank in range(NUM_RANKS))
    (whole,) = order.steps(_Place(0, 1), start=number, stop=number + 1)
    found = {}
    for rank in range(NUM_RANKS):
        (step,) = order.steps(_Place(rank, NUM_RANKS), start=number, stop=number + 1, division=Division(dealt=dealt))
        assert step.num_samples == whole.num_samples
        assert tuple(each.index for each in step.micro_batches) == dealt[rank]
        found |= {each.index: each for each in step.micro_batches}
    assert sorted(found) == list(range(whole.num_micro_batches))
    for expected in whole.micro_batches:
        assert np.array_equal(found[expected.index].indices, expected.indices)
        assert np.array_equal(found[expected.index].keys, expected.keys)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 7, 16, 20])
@pytest.mark.parametrize("global_batch", [1, 6, 7, 16])
def test_each_step_has_the_fewest_micro_batches_that_hold_it(global_batch: int, micro_batch: int) -> None:
    for step in Order(33, global_batch, micro_batch).steps(Alone(), stop=40):
        count = num_micro_batches(step.num_samples, micro_batch)
        assert step.num_micro_batches == count == len(step.micro_batches)
        assert (count - 1) * micro_batch < step.num_samples <= count * micro_batch


words = st.integers(0, 2**64 - 1)


@settings(max_examples=300, deadline=None)
@given(values=st.lists(words, min_size=1, max_size=20))
def test_mixing_an_array_is_mixing_each_word_and_leaves_the_array_alone(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    assert mix_array(array).tolist() == [mix(value) for value in values]
    assert array.tolist() == values


@settings(max_examples=300, deadline=None)
@given(seed=words, epoch=st.integers(0, 2**40), indices=st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
def test_a_samples_key_follows_from_seed_epoch_and_index_alone(seed: int, epoch: int, indices: list[int]) -> None:
    assert keys(seed, epoch, np.array(indices)).tolist() == [key(seed, SAMPLE, epoch, index) for index in indices]


def test_keys_of_different_things_differ() -> None:
    seen = {key(seed, use, one, two) for seed in range(8) for use in (ORDER, SAMPLE, FORWARD) for one in range(16)
            for two in range(16)}  # fmt: skip
    assert len(seen) == 8 * 3 * 16 * 16
    assert key(0, 1, 2) != key(0, 2, 1)
    assert key(1, 2) != key(2, 1)
    assert key(1, 1) != key(2, 2)


def test_one_input_bit_moves_about_half_of_the_output_bits() -> None:
    moved = [(mix(word) ^ mix(word ^ (1 << bit))).bit_count() for word in range(50) for bit in range(64)]
    assert 31 < np.mean(moved) < 33
    assert min(moved) > 8


def test_uniform_numbers_are_uniform_and_columns_independent() -> None:
    samples = keys(3, 0, np.arange(100_000))
    first, second = uniform(samples, 0), uniform(samples, 1)
    for column in (first, second):
        assert 0 <= column.min() <= column.max() < 1
        counts, _ = np.histogram(column, bins=100, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 170  # 99 degrees of freedom: exceeded once in 100,000
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.015


def test_several_columns_at_once_are_the_same_numbers() -> None:
    samples = keys(3, 0, np.arange(50))
    assert np.array_equal(uniforms(samples, range(2, 9)), np.stack([uniform(samples, c) for c in range(2, 9)], axis=1))


@settings(max_examples=50, deadline=None)
@given(word=words)
def test_a_key_seeds_all_three_generators_and_restores_them_afterwards(word: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with seeded(word):
        inside = draw()
    assert draw() == expected
    draw()
    with seeded(word):
        assert draw() == inside


def test_generators_are_put_back_after_an_error_too() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(1):
        torch.rand(1 // 0)
    assert torch.equal(torch.get_rng_state(), state)
