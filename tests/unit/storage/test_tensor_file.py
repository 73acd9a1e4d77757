"""Files of tensors are what the format's own library writes and reads."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from samebits.storage.tensor_file import write_tensors

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
         torch.int8, torch.uint8, torch.bool]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    made = torch.randint(0, 2, shape).to(draw(st.sampled_from(TYPES)))
    return made.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "some.safetensors"


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(st.text(min_size=1, max_size=6).filter(lambda text: text != "__metadata__"), tensors()))
def test_a_file_is_what_the_library_reads(file: Path, state: dict[str, Tensor]) -> None:
    moved: list[int] = []
    size, sha256 = write_tensors(file, state, moved.append)
    content = file.read_bytes()
    assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())
    back = load(content)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) and back[name].dtype == state[name].dtype for name in state)
    assert sum(moved) == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert all(entry["data_offsets"][0] % state[name].element_size() == 0 for name, entry in entries.items())


def test_a_network_s_file_is_byte_for_byte_the_library_s(file: Path) -> None:
    state = {"b.weight": torch.randn(3, 4), "a.weight": torch.randn(5), "a.num_batches_tracked": torch.tensor(3)}
    write_tensors(file, state)
    assert file.read_bytes() == save(state)


def test_a_tensor_of_several_pieces_is_written_whole(file: Path) -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    write_tensors(file, {"large": large.view(1000, 3000).t(), "small": torch.tensor(7)})
    back = load(file.read_bytes())
    assert torch.equal(back["large"], large.view(1000, 3000).t())
    assert back["small"] == 7


def test_a_type_that_the_format_does_not_know_is_named(file: Path) -> None:
    with pytest.raises(ValueError, match=r"w is torch\.complex64, which can't be saved"):
        write_tensors(file, {"w": torch.zeros(2, dtype=torch.complex64)})
