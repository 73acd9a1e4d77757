"""The plan of local steps: the same for each site in any world, and each sample once an epoch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.loader import requests_of
from samebits.data.micro_batches import Alone
from samebits.data.order import Order, Step
from samebits.engine.output.recorder import sample_ids
from samebits.parallel.local_steps.order import LocalStepOrder, OuterStep
from samebits.parallel.local_steps.placement import place_sites


@dataclass(frozen=True)
class Rank:
    rank: int
    size: int


def leaves(order: LocalStepOrder, size: int, stop: int, start: int = 0) -> dict[tuple[int, int, int], Any]:
    """The micro-batches of all ranks by outer step, site and local step, in the order of their leaves."""
    found: dict[tuple[int, int, int], list[Any]] = {}
    for rank in range(size):
        for step in order.steps(Rank(rank, size), start=start, stop=stop):
            assert isinstance(step, OuterStep)
            local = [each for _, steps in step.sites for each in steps]
            assert [each for one in local for each in one.micro_batches] == list(step.micro_batches)
            assert len(list(requests_of([step]))) == len(step.micro_batches)
            for site, steps in step.sites:
                for each in steps:
                    at = found.setdefault((step.number, site, each.number), [])
                    for micro in each.micro_batches:
                        at.append((micro.index, micro.weight, micro.forward_key, micro.indices.tolist()))
    return {name: sorted(value) for name, value in found.items()}


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 90),
    micro_batch=st.integers(1, 5),
    num_micro=st.integers(2, 7),
    every=st.integers(2, 5),
    num_sites=st.integers(2, 5),
    size=st.integers(1, 7),
    is_grouped=st.booleans(),
)
def test_a_site_has_the_same_local_steps_in_any_world(
    num_samples: int, micro_batch: int, num_micro: int, every: int, num_sites: int, size: int, is_grouped: bool
) -> None:
    groups = np.arange(num_samples) % 2 if is_grouped else None
    batch = micro_batch * num_micro
    order = LocalStepOrder(num_samples, batch * every, micro_batch, 3, groups, every=every, num_sites=num_sites)
    stop = 2 * order.steps_per_epoch
    found = leaves(order, size, stop)
    assert found == leaves(order, 1, stop)
    counts = Counter(index for value in found.values() for *_, indices in value for index in indices)
    assert set(counts.values()) == {2}
    assert len(counts) == num_samples
    plain = Order(num_samples, batch, micro_batch, 3, groups)
    assert order.num_local_steps(stop) == 2 * plain.steps_per_epoch
    for (_, site, number), value in found.items():
        (share,) = plain.steps(Rank(site, num_sites), start=number, stop=number + 1)
        assert [indices for *_, indices in value] == [each.indices.tolist() for each in share.micro_batches]
        assert [index for index, *_ in value] == list(range(len(value)))
        assert not value or sum(weight for _, weight, *_ in value) == pytest.approx(1)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), num_sites=st.integers(1, 40))
def test_sites_and_ranks_are_placed_next_to_each_other(size: int, num_sites: int) -> None:
    placements = [place_sites(Rank(rank, size), num_sites) for rank in range(size)]
    assert all(rank in each.own_ranks for rank, each in enumerate(placements))
    assert [each.group for each in placements] == sorted(each.group for each in placements)
    sites = {each.group: list(each.own_sites) for each in placements}
    assert [site for group in sorted(sites) for site in sites[group]] == list(range(num_sites))
    assert all(len(each.own_ranks) == 1 or len(each.own_sites) == 1 for each in placements)


def test_plans_can_start_at_any_step() -> None:
    order = LocalStepOrder(53, 32, 3, 1, every=2, num_sites=2)
    whole = leaves(order, 3, 7)
    later = leaves(order, 3, 7, start=3)
    assert later == {name: value for name, value in whole.items() if name[0] >= 3}
    assert [order.num_local_steps(number) for number in range(5)] == [0, 2, 4, 6, 8]
    odd = LocalStepOrder(53, 48, 3, 1, every=3, num_sites=2)
    assert [odd.num_local_steps(number) for number in range(5)] == [0, 3, 4, 7, 8]


@pytest.mark.parametrize("groups", [None, np.arange(53) % 3], ids=["whole", "grouped"])
def test_the_record_has_a_digest_of_each_outer_step(groups: Any) -> None:
    order = LocalStepOrder(53, 32, 3, 1, groups, every=2, num_sites=2)
    stop = 2 * order.steps_per_epoch
    digests = list(sample_ids(order, 0, stop))
    assert len(set(digests)) == stop
    assert list(sample_ids(order, 1, stop)) == digests[1:]
    steps: list[Step] = list(order.steps(Alone(), stop=stop))
    assert [step.number for step in steps] == list(range(stop))
    assert sum(step.num_samples for step in steps) == 2 * 53
