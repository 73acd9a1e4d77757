"""Files of weights that were made to take memory or time, to end the process, or to be read as something else."""

import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from samebits.errors import CheckpointError
from samebits.storage.pretrained import load_pretrained, read_state
from samebits.storage.weights import read

PROTO = b"\x80\x02"


def write_zip(path: Path, pickled: bytes, name: str = "data.pkl") -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"archive/{name}", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused_before_torch_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_zip(tmp_path / "w.pth", PROTO + b"](" + b"N" * 80_000_000 + b"e.")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError, match=r"bytes\s+would\s+unpack\s+to\s+80,"):
        read_state(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["data.pkl", "DATA.PKL"])
def test_a_pickle_that_calls_a_function_is_refused_and_runs_none(tmp_path: Path, name: str) -> None:
    call = b"cos\nmkdir\nX" + struct.pack("<I", 5) + b"never\x85R."
    write_zip(tmp_path / "w.pth", PROTO + call, name)
    with pytest.raises(CheckpointError, match="could run code"):
        read_state(tmp_path / "w.pth")
    assert not Path("never").exists()


def kinds() -> dict[str, Tensor]:
    ones = torch.ones(4)
    return {
        "sparse_coo": ones.to_sparse(),
        "complex64": ones.to(torch.complex64),
    }


@pytest.mark.parametrize("kind", kinds())
def test_tensors_that_can_not_be_a_models_weights_are_named(tmp_path: Path, kind: str) -> None:
    torch.save({"weight": kinds()[kind], "bias": torch.ones(4)}, tmp_path / "w.pth")
    model = nn.BatchNorm2d(4)
    with pytest.raises(CheckpointError, match=f"the tensor weight is {kind}"):
        load_pretrained(model, tmp_path / "w.pth")
    assert model.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["module." * 150_000 + "weight", "a." * 500_000 + "weight", "w" * 1_000_000])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_name_of_a_million_letters_is_refused_at_once(tmp_path: Path, name: str, suffix: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / f"w{suffix}"
    save = save_file if suffix == ".safetensors" else torch.save
    save({name: torch.ones(4)}, path)
    with pytest.raises(CheckpointError, match="a tensor whose name has") as caught:
        load_pretrained(nn.BatchNorm2d(4), path)
    assert len(str(caught.value)) < 1000


def write_header(path: Path, header: object, num_bytes: int = 16) -> Path:
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + bytes(num_bytes))
    return path


def test_a_header_of_more_tensors_than_a_model_has_is_refused_unread(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = write_header(tmp_path / "w.safetensors", {str(place): entry for place in range(300_000)}, 0)
    with pytest.raises(CheckpointError, match="at most 16,777,216 are read"):
        read_state(path)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F64", "C64", "U16", "F4"])
def test_weights_of_another_type_are_not_a_runs(tmp_path: Path, kind: str) -> None:
    num_bytes = {"F8_E4M3": 4, "F64": 32, "C64": 32, "U16": 8, "F4": 2}[kind]
    entry = {"dtype": kind, "shape": [4], "data_offsets": [0, num_bytes]}
    path = write_header(tmp_path / "w.safetensors", {"weight": entry}, num_bytes)
    with pytest.raises(CheckpointError):
        read(path, nn.BatchNorm2d(4, track_running_stats=False))
