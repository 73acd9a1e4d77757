"""Tensors that are stored in an unusual way have bytes, digests and files like any other of their values."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from samebits.cluster import collectives
from samebits.data.samples import Batch, sample_digests
from samebits.storage.tensor_file import write_tensors
from samebits.storage.weights import weights_sha256

UNUSUAL = {
    "expanded": torch.tensor(2.5).expand(1),
    "expanded twice": torch.tensor(2.5).expand(1, 1),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "scalar": torch.tensor(-0.0),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(params=UNUSUAL)
def tensor(request: pytest.FixtureRequest) -> Tensor:
    return UNUSUAL[request.param]


def plain(tensor: Tensor) -> Tensor:
    return torch.tensor(tensor.tolist()).reshape(tensor.shape)


def test_an_unusually_stored_tensor_reaches_other_ranks(tensor: Tensor) -> None:
    received = collectives.decode(collectives.encode({"x": tensor}), torch.device("cpu"))["x"]
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


def test_weights_have_the_hash_and_the_file_of_their_values(tensor: Tensor, tmp_path: Path) -> None:
    assert weights_sha256({"x": tensor}) == weights_sha256({"x": plain(tensor)})
    write_tensors(tmp_path / "w.safetensors", {"x": tensor})
    assert torch.equal(load_file(tmp_path / "w.safetensors")["x"], tensor)


def test_samples_have_the_digest_of_their_values(tensor: Tensor) -> None:
    made = [sample_digests(Batch(torch.zeros(1), {"x": each}, torch.tensor([3]))) for each in (tensor, plain(tensor))]
    assert made[0] == made[1]
