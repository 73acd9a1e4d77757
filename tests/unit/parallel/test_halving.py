"""The all-reduce in rounds on virtual ranks: the sum of one process, in few messages, in worlds of any size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from samebits.parallel.bucket import Bucket
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange import part
from samebits.parallel.exchange.part import is_in_rounds
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce
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
    coroutines = Coroutines(lambda: None, lambda _: None)
    network = Network(2, lambda: coroutines.wait(True))
    first = TreeAllReduce(Bucket([nn.Parameter(torch.empty(4))], 0, 1, CPU), world_of(0, 2, network), [[], [(0, 1)]], 0)

    def run() -> None:
        first.start()
        first.advance()

    with pytest.raises(RuntimeError, match="wait for messages that no rank sends"):
        coroutines.run([run, lambda: None], lambda _: network.deliver())
