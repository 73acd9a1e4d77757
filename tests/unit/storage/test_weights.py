"""Weights as one hash, as a file, and in a model that they may not fit."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from samebits.errors import CheckpointError
from samebits.storage.weights import load_into, read, weights_sha256, write_weights


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "conv.weight": torch.randn(8, 3, 5, 5),
        "bn.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3),
        "half": torch.randn(3).half(),
    }


def test_the_hash_does_not_depend_on_the_order_of_the_names() -> None:
    one = state()
    assert weights_sha256(one) == weights_sha256(dict(reversed(one.items())))


def test_the_hash_does_not_depend_on_the_layout_in_memory() -> None:
    one, other = state(), state()
    other["conv.weight"] = other["conv.weight"].contiguous(memory_format=torch.channels_last)
    other["half"] = torch.cat([other["half"], other["half"]])[:3]
    assert other["conv.weight"].stride() != one["conv.weight"].stride()
    assert weights_sha256(one) == weights_sha256(other)


def test_the_hash_does_not_depend_on_the_way_through_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    write_weights(file, state())
    assert weights_sha256(read(file)) == weights_sha256(state())


def test_the_hash_sees_the_last_bit_the_name_the_shape_and_the_type() -> None:
    changed = [state() for _ in range(5)]
    changed[0]["conv.weight"].view(-1).view(torch.int32)[-1] ^= 1
    changed[1]["conv2.weight"] = changed[1].pop("conv.weight")
    changed[2]["conv.weight"] = changed[2]["conv.weight"].reshape(8, 75)
    changed[3]["bn.num_batches_tracked"] = changed[3]["bn.num_batches_tracked"].int()
    changed[4]["nothing"] = torch.empty(3, 0)
    assert len({weights_sha256(one) for one in [state(), *changed]}) == 6


def network(width: int = 4, with_bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width, bias=with_bias), nn.BatchNorm1d(width), nn.Linear(width, 2))


def refusal(model: nn.Module, weights: dict[str, torch.Tensor]) -> str:
    before = weights_sha256(model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_into(model, weights, Path("runs/x/checkpoints/step-000009"))
    assert weights_sha256(model.state_dict()) == before
    return str(caught.value)


def test_weights_of_a_model_of_another_width_are_refused_with_names_and_shapes() -> None:
    text = refusal(network(4), network(6).state_dict())
    assert "the checkpoint is of another model" in text
    assert "runs/x/checkpoints/step-000009" in text
    assert "0.weight: (6, 3) in the file, (4, 3) in the model" in text
    assert "1.running_mean: (6,) in the file, (4,) in the model" in text
    assert "… 2 more" in text


def test_missing_and_unknown_weights_are_named_with_their_shapes() -> None:
    text = refusal(network(4), network(4, with_bias=False).state_dict() | {"head.weight": torch.ones(5, 4)})
    assert "missing: 0.bias (4,)" in text
    assert "unknown: head.weight (5, 4)" in text


def test_weights_that_fit_are_taken_whatever_their_layout() -> None:
    one, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    load_into(other, one.state_dict(), Path("x"))
    assert weights_sha256(one.state_dict()) == weights_sha256(other.state_dict())
    assert other.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_damaged_or_missing_file_of_weights_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    with pytest.raises(CheckpointError, match=f"{file} does not exist"):
        read(file)
    write_weights(file, state())
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=f"{file} can't be read as safetensors"):
        read(file)
