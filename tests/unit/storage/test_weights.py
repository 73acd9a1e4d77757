"""Weights as one hash and as a file; files that are no weights, or that could run code, are named, and run none."""

import hashlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn

from samebits.errors import CheckpointError
from samebits.storage.pretrained import load_pretrained, read_state
from samebits.storage.tensor_file import write_tensors
from samebits.storage.weights import load_into, read, weights_sha256, write_weights


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "conv.weight": torch.randn(8, 3, 5, 5), "bn.num_batches_tracked": torch.tensor(7),
        "mask": torch.tensor([True, False]), "nothing": torch.empty(0, 3), "half": torch.randn(3).half(),
    }  # fmt: skip


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


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


class Trap:
    """Runs code when a careless reader unpickles it."""

    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (_spring, ())


def _spring() -> str:
    Trap.ran = True
    return "sprung"


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_a_file_that_could_run_code_is_refused_and_runs_none(tmp_path: Path, old: bool) -> None:
    content = {"state_dict": net().state_dict(), "args": Trap()}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=not old)
    with pytest.raises(CheckpointError, match="could run code from it") as caught:
        read_state(tmp_path / "a.pth")
    assert not Trap.ran
    assert "_spring" in caught.value.slots["given"]
    assert "weights_only=False" in caught.value.slots["fix"]


def test_a_whole_model_as_torch_save_pickles_it_is_refused_with_a_fix(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="more than tensors and plain values") as caught:
        read_state(tmp_path / "model.pt")
    assert caught.value.slots["given"] == "torch.nn.modules.container.Sequential"
    assert "content.state_dict()" in caught.value.slots["fix"]
    assert all(len(line) <= 80 for line in str(caught.value).splitlines()[1:])
    held = torch.load(tmp_path / "model.pt", weights_only=False)  # as the fix instructs
    torch.save(held.state_dict(), tmp_path / "new.pt")
    assert len(read_state(tmp_path / "new.pt")) == 7


def _cut(path: Path) -> None:
    torch.save(net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-200])


def test_a_file_of_torchs_old_form_that_was_cut_off_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.ones(3), "b": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    for length in range(2, len(content), 3):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError) as caught:
            read_state(path)
        assert caught.value.slots["fix"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (b"<html>404 not found</html>", "is not a file of weights, or is damaged"),
        (b"hello\n", "is not a file of weights, or is damaged"),
        (b"\x80", "is not a file of weights, or is damaged"),
        (b"", "is empty"),
        (lambda path: path.symlink_to(Path(__file__) / "weights.pth"), "can't be read\n  cause  Not a directory"),
        (_cut, "can't be read as weights"),
        (pickle.dumps({"weight": np.zeros(3)}, protocol=2), ""),
        (lambda path: torch.save({"epoch": 3, "history": [1.0, 2.0]}, path),
         "holds no weights\n  given    a dict of epoch, history"),
        (lambda path: None, "does not exist"),
        (Path.mkdir, "is a folder"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, make: Any, text: str, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if isinstance(make, bytes):
        path.write_bytes(make)
    else:
        make(path)
    with pytest.raises(CheckpointError) as caught:
        read_state(path)
    assert str(path) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    if suffix == ".pth":
        assert text in str(caught.value)


def test_a_value_that_the_reader_failed_on_is_named_with_its_exception(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"\x80\x02he")
    with pytest.raises(CheckpointError, match="can't be read as weights") as caught:
        read_state(tmp_path / "a.pth")
    assert caught.value.slots["cause"] == "KeyError 101"


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_missing_file_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        load_pretrained(net(), Path("here", f"w{suffix}"))
    assert caught.value.slots["where"] == str(tmp_path / "here")
    assert "model.weights" in caught.value.slots["fix"]
