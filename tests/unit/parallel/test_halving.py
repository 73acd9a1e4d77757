"""All-reduces on virtual ranks, in rounds and between machines: the sum of one process, in few messages."""

import math
from collections import Counter
from itertools import chain, repeat
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits.cluster.address import numbered
from samebits.data.division import EVEN, even_shares
from samebits.parallel.bucket import Bucket
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange import part, tree_all_reduce
from samebits.parallel.exchange.part import is_in_rounds
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce, shares
from tests.unit.parallel.all_reduces import CPU, leaves, reduce, total, world_of
from tests.unit.parallel.virtual_network import Network


@settings(max_examples=30)
@given(size=st.integers(2, 40), num=st.integers(1, 60), length=st.integers(1, 70))
def test_every_rank_has_the_sum_of_one_process(size: int, num: int, length: int) -> None:
    values = leaves(num, length)
    found, _, kinds = reduce(values, size)
    assert kinds == {size > part.DIRECT_SIZE}
    assert all(torch.equal(each, total(values)) for each in found)


@pytest.mark.parametrize("size", [64, 128])
def test_a_rank_sends_few_messages_and_hardly_more_bytes_than_a_ring(size: int) -> None:
    _, network, _ = reduce(leaves(2 * size, 4096), size)
    rounds = int(math.log2(size))
    assert {each.messages for each in network.traffic} == {2 * rounds}
    assert network.rounds == 2 * rounds
    least = 4 * 4096 * 2 * (size - 1) / size
    assert all(least <= each.num_bytes <= 1.01 * least for each in network.traffic)


@pytest.mark.parametrize(("size", "length"), [(3, 300_000), (8, 100_000), (8, 1_000)])
def test_a_rank_borrows_memory_only_for_what_it_receives(
    monkeypatch: pytest.MonkeyPatch, size: int, length: int
) -> None:
    lengths: list[int] = []
    borrow = Bucket.borrow

    def counted(bucket: Bucket, length: int, *, on_host: bool = False) -> Tensor:
        lengths.append(length)
        return borrow(bucket, length, on_host=on_host)

    monkeypatch.setattr(Bucket, "borrow", counted)
    values = leaves(size, length)
    found, network, kinds = reduce(values, size)
    assert kinds == {False}
    assert all(torch.equal(each, total(values)) for each in found)
    is_in_chunks = network.rounds == 2
    assert is_in_chunks == (length > 1_000)
    received = (size - 1) * length * (1 if is_in_chunks else size)  # by all ranks, before the sums of chunks
    assert received <= sum(lengths) <= received * 1.01


def test_a_bucket_lends_the_same_memory_again_where_it_is_long_enough() -> None:
    bucket = Bucket([nn.Parameter(torch.empty(64))], 0, 1, CPU)
    first, second = bucket.borrow(8), bucket.borrow(16)
    bucket.start_step(())
    assert bucket.borrow(4).data_ptr() == first.data_ptr()
    assert bucket.borrow(32).data_ptr() != second.data_ptr()
    assert [len(bucket.borrow(0)), len(bucket.borrow(64))] == [0, 64]


def test_a_large_bucket_is_sent_to_all_ranks_at_once() -> None:
    assert is_in_rounds(64, 1 << 20)
    assert not is_in_rounds(64, 1 << 23)
    assert not is_in_rounds(16, 1 << 10)


def test_ranks_that_wait_for_a_message_that_is_not_sent_are_an_error() -> None:
    coroutines = Coroutines(lambda: lambda: None)
    network = Network(2, lambda: coroutines.wait(True))
    first = TreeAllReduce(Bucket([nn.Parameter(torch.empty(4))], 0, 1, CPU), world_of(0, 2, network), [[], [(0, 1)]], 0)

    def run() -> None:
        first.start()
        first.advance()

    with pytest.raises(RuntimeError, match="wait for messages that no rank sends"):
        coroutines.run([run, lambda: None], lambda _: network.deliver())


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
def test_every_rank_of_several_machines_has_the_sum_of_one_process(
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
