"""Files of weights that were made to take memory or time, to end the process, or to be read as something else."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from samebits.errors import CheckpointError
from samebits.storage.pickle_walk import CALLABLE
from samebits.storage.pretrained import load_pretrained, read_state
from samebits.storage.weights import read

PROTO = b"\x80\x02"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name_of(full: str) -> bytes:
    module, _, name = full.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    return b"\x8a\x0c" + value.to_bytes(12, "little")


LIST = b"](" + b"K\x01" * 20_000 + b"eq\x07"
ENCODE = name_of("_codecs.encode")
SAME_HASH = b"".join(number(place * (2**61 - 1)) + b"N" for place in range(20_000))
DICT = b"}(" + b"".join(text(f"k{place}") + b"N" for place in range(20_000)) + b"uq\x07"


def many(what: bytes, made: bytes) -> bytes:
    """A container in the memo, and what is made from it, 200 times."""
    return what + b"](" + made * 200 + b"e\x86"


BOMBS = {
    "a deep tuple as a key": b"}" + b"N" + b"\x85" * 300_000 + b"K\x01s",
    "a tuple of twos": b"K\x01" + b"q\x01h\x01\x86" * 60,
    "a tuple that is hashed again and again": b"}(" + b"(" + b"K\x01" * 5000 + b"tq\x07N" + b"h\x07N" * 20_000 + b"u",
    "keys that all have one hash": b"}(" + SAME_HASH + b"u",
    "bytes": name_of("builtins.bytearray") + number(8_000_000_000) + b"\x85R",
    "text that doubles": name_of("_codecs.encode") + text("ab") + text("hex") + b"\x86R",
    "text as bytes": many(text("a" * 10**6) + b"q\x07", ENCODE + b"h\x07" + text("latin1") + b"\x86R"),
    "sets": many(LIST, name_of("builtins.set") + b"h\x07\x85R"),
    "sizes": many(LIST, name_of("torch.Size") + b"h\x07\x85R"),
    "sizes from a list of arguments": many(LIST, name_of("torch.Size") + b"](h\x07eR"),
    "namespaces": many(DICT, name_of("argparse.Namespace") + b")\x81h\x07b"),
    "dicts": many(DICT, name_of("collections.OrderedDict") + b"h\x07\x85R"),
    "tensors": many(LIST, name_of("torch.Tensor") + b"h\x07\x85R"),
    "a call within a call": name_of("torch._tensor._rebuild_from_type_v2")
    + b"(" + name_of("builtins.bytearray") + name_of("torch.Tensor") + number(8_000_000_000) + b"\x85NtR",
    "many values": b"](" + b"N" * 700_000 + b"e",
    "a long name": name_of("os" * 100_000 + ".system"),
    "a value that is not there": b"0",
    "a mark as a value": b"(\x85",
}  # fmt: skip


def write_zip(path: Path, pickled: bytes, name: str = "data.pkl") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"archive/{name}", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    path.write_bytes(file.getvalue())
    return file.getvalue()


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_takes_memory_or_time_is_refused_before_torch_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: str
) -> None:
    write_zip(tmp_path / "w.pth", PROTO + BOMBS[bomb] + b".")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError) as caught:
        read_state(tmp_path / "w.pth")
    assert "NoneType" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_all_that_a_pickle_may_call_is_what_torch_allows_or_stands_for_something_harmless() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    ours = {name for name in CALLABLE if not name.startswith(("numpy", "pathlib", "argparse", "__builtin__"))}
    assert ours <= set(_get_allowed_globals())


def test_a_name_in_capitals_which_torch_finds_too_is_looked_into(tmp_path: Path) -> None:
    write_zip(tmp_path / "w.pth", PROTO + BOMBS["a deep tuple as a key"] + b".", name="DATA.PKL")
    with pytest.raises(CheckpointError) as caught:
        read_state(tmp_path / "w.pth")
    assert "stands for too many values" in " ".join(str(caught.value).split())


def test_a_zip_file_with_a_directory_for_each_reader_is_refused(tmp_path: Path) -> None:
    shown = write_zip(tmp_path / "w.pth", PROTO + b"}.")
    hidden = write_zip(tmp_path / "w.pth", PROTO + b"](" + b"N" * 100_000 + b"e.")
    end, hidden_end = shown.rfind(b"PK\5\6"), hidden.rfind(b"PK\5\6")
    place = hidden[hidden_end + 16 : hidden_end + 20]  # of the hidden one's directory, in a file that begins with it
    (tmp_path / "w.pth").write_bytes(hidden[:hidden_end] + shown[: end + 16] + place + shown[end + 20 :])
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:
        assert archive.getinfo("archive/data.pkl").file_size == 4  # what Python's reader finds
    with pytest.raises(CheckpointError, match="directory"):
        read_state(tmp_path / "w.pth")


def test_a_zip_file_with_the_directory_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.ones(4)}, path)
    content = path.read_bytes()
    end = content.rfind(b"PK\5\6")
    num, size, start = struct.unpack("<HLL", content[end + 10 : end + 20])
    content = content[: start + size]
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, num, num, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, len(content), 1)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(content + record + locator + last)
    assert read_state(path)["a"].tolist() == [1.0] * 4


def test_a_tar_file_that_is_a_pickle_too_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("\x80\x02N." * 5)
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    (tmp_path / "w.pth").write_bytes(info.tobuf(tarfile.GNU_FORMAT, "latin1", "strict"))
    with pytest.raises(CheckpointError, match="tar file"):
        read_state(tmp_path / "w.pth")


def test_tensors_whose_values_are_not_in_a_file_are_not_taken_from_memory(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save({"a": torch.ones(4), "b": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    assert len(read_state(path)) == 2
    start = content.rfind(PROTO + b"]")
    path.write_bytes(content[:start] + PROTO + b"].")
    with pytest.raises(CheckpointError, match="lacks the values"):
        read_state(path)


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
