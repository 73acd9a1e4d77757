"""Owners of tensors, and the order of micro-batches for them: balanced, and the same on all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.division import IN_TURN
from samebits.data.order import Order
from samebits.parallel.bucket import Layout
from samebits.parallel.exact_fsdp.unit import assign_owners

SIZES = st.lists(st.integers(1, 10**6), max_size=60)


@settings(deadline=None)
@given(sizes=SIZES, num_ranks=st.integers(1, 17))
def test_each_tensor_has_one_owner_and_no_rank_more_than_its_share_and_one_tensor(
    sizes: list[int], num_ranks: int
) -> None:
    owners = assign_owners(sizes, num_ranks)
    assert len(owners) == len(sizes)
    assert all(0 <= owner < num_ranks for owner in owners)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes, default=0)
    assert owners == assign_owners(sizes, num_ranks)


def test_equal_tensors_are_dealt_out_evenly() -> None:
    assert assign_owners([5] * 6, 3) == [0, 1, 2, 0, 1, 2]
    assert assign_owners([1, 9, 1], 2) == [1, 0, 1]


@settings(deadline=None, max_examples=20)
@given(
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 30),
    micro_batch=st.integers(1, 7),
    size=st.integers(1, 6),
)
def test_dealt_micro_batches_are_those_of_one_process(
    num_samples: int, global_batch: int, micro_batch: int, size: int
) -> None:
    alone = SimpleNamespace(rank=0, size=1, machines=())
    places = [SimpleNamespace(rank=rank, size=size, machines=()) for rank in range(size)]
    every = [
        Order(num_samples, global_batch, micro_batch, division=IN_TURN).steps(place, start=1, stop=4)
        for place in places
    ]  # fmt: skip
    expected = Order(num_samples, global_batch, micro_batch).steps(alone, start=1, stop=4)
    for step, *mine in zip(expected, *every, strict=True):
        passes = list(zip(*(each.micro_batches for each in mine), strict=True))  # equally many on all ranks
        real = [each for row in passes for each in row if each.weight]
        assert [each.index for each in real] == list(range(step.num_micro_batches))
        assert [each.indices.tolist() for each in real] == [each.indices.tolist() for each in step.micro_batches]
        assert all(each.weight == 0 and each.index == 0 for row in passes for each in row if each not in real)


def test_a_layout_keeps_shapes_and_strides_at_multiples_of_64_bytes() -> None:
    tensors = [torch.randn(3), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(16)]
    layout = Layout(tensors)
    values = layout.allocate().fill_(float("nan"))
    for index, tensor in enumerate(tensors):
        view = layout.view(values, index)
        view.copy_(tensor)
        layout.zero_gap(values, index)
        assert view.stride() == tensor.stride()
        assert (view.data_ptr() - values.data_ptr()) % 64 == 0
    assert all(torch.equal(layout.view(values, index), tensor) for index, tensor in enumerate(tensors))
    assert values.isfinite().all()
    assert len(values) == layout.length == 16 + 128 + 16
