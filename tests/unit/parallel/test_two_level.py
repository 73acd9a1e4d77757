"""The all-reduce between machines on virtual ranks: the sum of one process, and each value once over each link."""

from __future__ import annotations

from collections import Counter
from itertools import chain, repeat
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.cluster.address import numbered
from samebits.data.division import EVEN, even_shares
from samebits.parallel.exchange import part, tree_all_reduce
from samebits.parallel.exchange.tree_all_reduce import shares
from tests.unit.parallel.all_reduces import leaves, reduce, total

LENGTH = 9_000  # values, above `FLAT_BYTES`


def layout(*counts: int) -> tuple[int, ...]:
    """For each rank the number of its machine, given the ranks of each machine."""
    return tuple(chain.from_iterable(repeat(machine, count) for machine, count in enumerate(counts)))


MACHINES = st.lists(st.sampled_from("abcde"), min_size=2, max_size=9).map(numbered)  # in any order of ranks
LENGTHS, LIMITS = st.integers(4_097, 4_400), st.sampled_from([0, 1 << 30])


@settings(max_examples=30, deadline=None)
@given(
    machines=MACHINES,
    num=st.integers(1, 40),
    length=st.integers(4_097, 4_400),
    small_bytes=st.sampled_from([0, 1 << 30]),
)
def test_every_rank_has_the_sum_of_one_process(
    machines: tuple[int, ...], num: int, length: int, small_bytes: int
) -> None:
    values = leaves(num, length)
    with patch.object(tree_all_reduce, "SMALL_BYTES", small_bytes):
        found, _, _ = reduce(values, len(machines), machines=machines)
    assert all(torch.equal(each, total(values)) for each in found)


@settings(max_examples=10, deadline=None)
@given(machines=MACHINES, num=st.integers(9, 30), data=st.data())
def test_nodes_may_be_anywhere_after_a_loss(machines: tuple[int, ...], num: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, len(machines) - 1), min_size=num, max_size=num))
    dealt = [tuple(leaf for leaf, owner in enumerate(owners) if owner == rank) for rank in range(len(machines))]
    values = leaves(num, LENGTH)
    found, _, _ = reduce(values, len(machines), machines=machines, shares=dealt)
    assert all(torch.equal(each, total(values)) for each in found)


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (4, 4), (2, 2, 2), (3, 1), (4, 2), (1, 1, 4), (2,) * 4])
@pytest.mark.parametrize("per_rank", [1, 4])
def test_a_machine_sends_hardly_more_bytes_than_a_ring_of_machines(counts: tuple[int, ...], per_rank: int) -> None:
    machines, length = layout(*counts), 60_000
    _, network, _ = reduce(leaves(per_rank * len(machines), length), len(machines), machines=machines)
    least = 4 * length * 2 * (len(counts) - 1) / len(counts)
    assert all(each.num_bytes <= 1.05 * least for each in network.links)


def test_all_ranks_of_a_machine_use_the_link() -> None:
    _, network, _ = reduce(leaves(8, 60_000), 4, machines=layout(2, 2))
    assert len({each.num_bytes for each in network.traffic}) == 1
    assert {each.messages for each in network.traffic} == {3}  # inside, between, inside


def test_a_small_bucket_takes_one_round() -> None:
    _, network, _ = reduce(leaves(8, 1_000), 4, machines=layout(2, 2))
    assert network.rounds == 1


def test_many_machines_exchange_in_rounds() -> None:
    values = leaves(40, LENGTH)
    with patch.object(part, "DIRECT_SIZE", 3):
        found, network, _ = reduce(values, 10, machines=layout(*[2] * 5))
    assert all(torch.equal(each, total(values)) for each in found)
    assert network.rounds > 4


@pytest.mark.lab
def test_1024_ranks_on_128_machines_have_the_sum_of_one_process() -> None:
    values = leaves(1024, 5_000)
    found, network, _ = reduce(values, 1024, machines=layout(*[8] * 128))
    assert all(torch.equal(each, total(values)) for each in found)
    assert max(each.num_bytes for each in network.links) <= 1.2 * 4 * 5_000 * 2  # chunks are whole lines of memory


@given(num=st.integers(1, 60), machines=MACHINES)
def test_micro_batches_by_machine_are_as_even_as_without(num: int, machines: tuple[int, ...]) -> None:
    found = EVEN.leaves(num, len(machines), machines)
    assert sorted(chain.from_iterable(found)) == list(range(num))
    assert Counter(map(len, found)) == Counter(last - first for first, last in even_shares(num, len(machines)))
    assert found[0]  # rank 0 sends its flag with its sums


def test_a_machine_with_several_nodes_adds_more() -> None:
    assert shares((1, 1)) == [1, 1]
    both_once = shares((2, 1))
    assert both_once[1] == 0
    assert shares((2, 2)) == [16, 16]
