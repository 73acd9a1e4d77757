"""Samples in groups: each once an epoch, no group mixed in a micro-batch, the same for every world."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import Batches
from samebits.data.order import MicroBatch, Order
from tests.unit.data.test_order import Seat, plain, run

worlds = st.integers(1, 5)
many = settings(max_examples=10, deadline=None)


@st.composite
def grouped_orders(draw: st.DrawFn) -> Order:
    # Some groups are empty, some have a single sample.
    groups = draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
    return Order(
        num_samples=len(groups),
        global_batch=draw(st.integers(1, 30)),
        micro_batch=draw(st.integers(1, 12)),
        seed=draw(st.integers(0, 2**63 - 1)),
        groups=np.array(groups, dtype=np.int64),
    )


def epoch_of(order: Order, epoch: int, world: int = 1) -> list[list[MicroBatch]]:
    return run(order, world, epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)


@many
@given(order=grouped_orders(), world=worlds, epoch=st.integers(0, 2))
def test_every_sample_comes_once_an_epoch(order: Order, world: int, epoch: int) -> None:
    micros = [micro for step in epoch_of(order, epoch, world) for micro in step]
    assert sorted(index for micro in micros for index in micro.indices.tolist()) == list(range(order.num_samples))


@many
@given(order=grouped_orders())
def test_a_micro_batch_is_of_one_group_and_a_step_of_its_size(order: Order) -> None:
    for micros in epoch_of(order, 0):
        for micro in micros:
            assert len(set(order.groups[micro.indices].tolist())) == 1
            assert 1 <= len(micro) <= order.micro_batch
        num_samples = sum(len(micro) for micro in micros)
        assert num_samples <= order.global_batch
        assert all(micro.weight == len(micro) / num_samples for micro in micros)
        assert math.fsum(micro.weight for micro in micros) == pytest.approx(1, abs=1e-12)


@many
@given(order=grouped_orders(), before=worlds, after=worlds, data=st.data())
def test_the_world_and_a_resume_change_no_micro_batch(
    order: Order, before: int, after: int, data: st.DataObject
) -> None:
    stop = 2 * order.steps_per_epoch
    at = data.draw(st.integers(0, stop))
    whole = run(order, 1, 0, stop)
    shared = run(order, before, 0, at) + run(order, after, at, stop)
    assert [[plain(micro) for micro in step] for step in whole] == [[plain(micro) for micro in step] for step in shared]


def test_steps_mix_groups_and_epochs_differ() -> None:
    groups = np.repeat(np.arange(4), 100)
    order = Order(400, 40, 10, seed=3, groups=groups)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    mixed = [len({int(groups[micro.indices[0]]) for micro in micros}) for micros in first]
    assert np.mean(mixed) > 2
    assert first[0][0].indices.tolist() != second[0][0].indices.tolist()
    assert {len(micro) for micros in first for micro in micros} == {10}


@pytest.mark.full
def test_every_sample_of_a_group_is_as_likely_to_come_first() -> None:
    groups = np.array([0] * 6 + [1] * 3)
    counts = np.zeros(9)
    for seed in range(240):
        (step,) = Order(9, 3, 3, seed=seed, groups=groups).steps(Seat(0, 1), stop=1)
        counts[step.micro_batches[0].indices[0]] += 1
    # Three micro-batches, one of them the second group's: each sample comes first with probability 1/9.
    assert counts.min() > 240 / 9 * 0.5
    assert counts.max() < 240 / 9 * 1.5


def test_without_groups_the_order_is_the_recorded_one() -> None:
    digest = hashlib.sha256()
    order = Order(num_samples=1003, global_batch=64, micro_batch=9, seed=7)
    for micros in run(order, 2, 0, 2 * order.steps_per_epoch):
        digest.update(repr([plain(micro) for micro in micros]).encode())
    assert digest.hexdigest()[:16] == "be013411e49a43ce"


def test_as_many_groups_as_samples_are_needed() -> None:
    with pytest.raises(ValueError, match="groups has 3 entries for 4 samples"):
        Order(4, 2, 1, groups=np.zeros(3, dtype=np.int64))


@many
@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=50), batch_size=st.integers(1, 9))
def test_an_evaluation_sees_each_sample_once_with_groups_apart(groups: list[int], batch_size: int) -> None:
    batches = Batches(len(groups), batch_size, np.array(groups, dtype=np.int64))
    cuts = [batches[place] for place in range(len(batches))]
    assert sorted(np.concatenate(cuts).tolist()) == list(range(len(groups)))
    assert all(1 <= len(cut) <= batch_size for cut in cuts)
    assert all(len({groups[index] for index in cut.tolist()}) == 1 for cut in cuts)


@many
@given(num_samples=st.integers(1, 60), batch_size=st.integers(1, 70))
def test_without_groups_an_evaluation_goes_straight_through(num_samples: int, batch_size: int) -> None:
    batches = Batches(num_samples, batch_size)
    assert np.concatenate([batches[place] for place in range(len(batches))]).tolist() == list(range(num_samples))
    assert all(len(batches[place]) == batch_size for place in range(len(batches) - 1))
