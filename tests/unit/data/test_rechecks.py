"""The plan of rechecks: the same on all ranks, a fraction of all micro-batches, and never a rank's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from samebits.data.loader import Loader, requests_of
from samebits.data.order import MicroBatch, Order
from samebits.data.samples import DatasetSamples


@dataclass(frozen=True)
class Rank:
    rank: int
    size: int
    machines: tuple[int, ...] = ()


def same(one: MicroBatch, other: MicroBatch) -> bool:
    arrays = np.array_equal(one.indices, other.indices) and np.array_equal(one.keys, other.keys)
    rest = (one.index, one.weight, one.forward_key) == (other.index, other.weight, other.forward_key)
    return arrays and rest


@pytest.mark.parametrize("groups", [None, np.arange(203) % 3], ids=["whole", "grouped"])
@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.full)])
def test_another_rank_repeats_what_the_owner_computes(size: int, groups: Any) -> None:
    order = Order(203, 24, 4, 7, groups, recheck=0.4)
    plain = Order(203, 24, 4, 7, groups)
    worlds = [list(order.steps(Rank(rank, size), stop=40)) for rank in range(size)]
    num_repeats = 0
    for number, steps in enumerate(zip(*worlds, strict=True)):
        assert len({step.rechecks for step in steps}) == 1
        for rank, step in enumerate(steps):
            (other,) = plain.steps(Rank(rank, size), start=number, stop=number + 1)
            assert all(map(same, step.micro_batches, other.micro_batches))
            mine = [each for each in step.rechecks if each.rank == rank]
            assert [each.index for each in mine] == [repeat.index for repeat in step.repeats]
            for each, repeat in zip(mine, step.repeats, strict=True):
                assert each.owner != rank
                (owned,) = [found for found in steps[each.owner].micro_batches if found.index == each.index]
                assert same(owned, repeat)
                assert repeat.is_repeat
                assert not owned.is_repeat
                num_repeats += 1
    assert num_repeats > 40


def test_the_fraction_of_repeated_micro_batches_is_the_setting_s() -> None:
    order = Order(10_000, 96, 8, 1, recheck=1 / 50)
    steps = list(order.steps(Rank(1, 3), stop=10_000))
    share = sum(len(step.repeats) for step in steps) / sum(len(step.micro_batches) for step in steps)
    assert share == pytest.approx(1 / 50, rel=0.1)
    everything = Order(100, 96, 8, 1, recheck=1.0)
    for step in everything.steps(Rank(0, 3), stop=5):
        assert sorted(each.index for each in step.rechecks) == list(range(step.num_micro_batches))


def test_a_rank_reads_its_repeats_after_its_own_micro_batches_of_the_step() -> None:
    order = Order(100, 32, 8, 1, recheck=0.5)
    requests = [indices.tolist() for indices, _ in requests_of(order.steps(Rank(1, 2), start=3, stop=9))]
    steps = order.steps(Rank(1, 2), start=3, stop=9)
    assert requests == [each.indices.tolist() for step in steps for each in (*step.micro_batches, *step.repeats)]


def test_one_rank_alone_repeats_nothing() -> None:
    order = Order(100, 32, 8, 1, recheck=1.0)
    assert all(not step.rechecks and not step.repeats for step in order.steps(Rank(0, 1), stop=20))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_repeats_and_of_another_reading_are_no_part_of_the_record(num_workers: int) -> None:
    step = next(Order(40, 16, 4, 1, recheck=1.0).steps(Rank(1, 2), stop=1))
    inputs = torch.arange(40.0)
    samples = DatasetSamples([(inputs[index], 0) for index in range(40)])
    loader = Loader(samples, lambda: requests_of([step]), torch.device("cpu"), num_workers=num_workers)
    loader.digests = []
    for each in (*step.micro_batches, *step.repeats):
        batch = loader.batch(each.indices, each.keys, is_repeat=each.is_repeat)
        assert torch.equal(batch.inputs, inputs[each.indices])
    again = step.micro_batches[0]
    assert torch.equal(loader.batch(again.indices, again.keys, again=True).inputs, inputs[again.indices])
    loader.close()
    assert len(loader.digests) == len(step.micro_batches)
