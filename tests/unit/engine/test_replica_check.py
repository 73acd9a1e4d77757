"""Checksums that change with any bit, ranks that differ, flags in a sum over ranks, and a new rank 0's records."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.engine.output.recorder import recover_chain
from samebits.engine.progress import StepFlags
from samebits.engine.replica_check import describe_tensor, odd_ranks
from samebits.errors import CheckpointError
from samebits.parallel import checksum
from samebits.parallel.checksum import checksums
from samebits.provenance.record import FIRST_LINK

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def of(tensor: Tensor) -> int:
    return checksums({"w": tensor})["w"]


@settings(max_examples=100, deadline=None)
@given(dtype=st.sampled_from(TYPES), size=st.integers(1, 40), data=st.data())
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    before = of(tensor)
    num_bytes = tensor.numel() * tensor.element_size()
    place = data.draw(st.integers(0, num_bytes - 1))
    bit = 0 if dtype == torch.bool else data.draw(st.integers(0, 7))
    tensor.view(torch.uint8)[place] ^= 1 << bit
    assert of(tensor) != before


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=30), st.data())
def test_values_that_change_places_change_the_sum(values: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(values))
    ours, theirs = of(torch.tensor(values, dtype=torch.int32)), of(torch.tensor(other, dtype=torch.int32))
    assert (ours == theirs) == (values == list(other))


def test_changes_of_several_places_do_not_cancel() -> None:
    assert of(torch.tensor([0, -1, 0, 1], dtype=torch.int32)) != of(torch.tensor([-1, 0, 1, 0], dtype=torch.int32))
    sums = [of(torch.tensor(values, dtype=torch.int8)) for values in itertools.product((-1, 0, 1), repeat=8)]
    assert len(set(sums)) == 3**8


def test_a_tensor_of_several_pieces_is_summed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_PIECE", 8)
    tensor = torch.arange(50, dtype=torch.float32).sqrt()  # no two alike, so that a change of places is one
    before = of(tensor)
    for place in range(50):
        changed = tensor.clone()
        changed[place] += 1
        assert of(changed) != before
    swapped = torch.cat([tensor[8:16], tensor[:8], tensor[16:]])
    assert of(swapped) != before


def test_the_layout_in_memory_changes_nothing_and_not_a_number_is_a_value_like_others() -> None:
    pictures = torch.randn(2, 3, 4, 5)
    assert of(pictures) == of(pictures.to(memory_format=torch.channels_last))
    broken = torch.tensor([float("nan"), 1.0])
    assert of(broken) == of(broken.clone()) != of(torch.tensor([1.0, float("nan")]))
    assert checksums({}) == {}
    assert of(torch.tensor(3)) != of(torch.tensor(4))
    assert of(torch.zeros(0)) == 0


def test_an_optimizer_s_tensor_is_called_by_its_parameter() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD([{"params": model[1].parameters()}, {"params": model[0].parameters()}], lr=0.1)
    job: Any = SimpleNamespace(model=model, optimizer=optimizer)
    assert describe_tensor("optimizer:0:momentum_buffer", job) == "momentum_buffer of 1.weight"
    assert describe_tensor("optimizer:3:momentum_buffer", job) == "momentum_buffer of 0.bias"
    assert describe_tensor("0.weight", job) == "0.weight"


@pytest.mark.parametrize(
    ("groups", "odd"),
    [
        ([[0, 2], [1]], [1]),
        ([[0], [1, 2, 3]], [0]),
        ([[0, 1, 2], [3], [4]], [3, 4]),
        ([[0], [1]], []),
        ([[0, 1], [2, 3]], []),
        ([[0], [1], [2]], []),
    ],
)
def test_the_odd_ones_are_those_outside_of_the_majority(groups: list[list[int]], odd: list[int]) -> None:
    assert odd_ranks(groups) == odd


@pytest.mark.parametrize("number", range(16))
def test_what_rank_0_packs_every_rank_unpacks(number: int) -> None:
    flags = StepFlags(number)
    summed = torch.tensor([float(flags), 0.0, 0.0], dtype=torch.float32).sum().item()
    assert StepFlags.unpack(summed) == flags


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_a_sum_that_is_not_finite_has_no_flags(value: float) -> None:
    assert StepFlags.unpack(value) == StepFlags(0)


def job(step: int) -> Any:
    progress, record = SimpleNamespace(step=step), SimpleNamespace(steps=True)
    return cast(Any, SimpleNamespace(progress=progress, config=SimpleNamespace(record=record), last_result=None))


def test_a_rank_0_that_is_lost_before_the_first_step_has_written_no_records(tmp_path: Path) -> None:
    assert recover_chain(job(0), tmp_path) == FIRST_LINK.hex()


def test_records_that_are_missing_later_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        recover_chain(job(5), tmp_path)
