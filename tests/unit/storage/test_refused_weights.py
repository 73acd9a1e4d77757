"""Files that are no weights, or that could run code: each is named, and runs none."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from samebits.errors import CheckpointError
from samebits.storage.pretrained import load_pretrained, read_state


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


def _junk(path: Path) -> None:
    path.write_bytes(b"<html>404 not found</html>")


def _text(path: Path) -> None:
    path.write_text("hello\n")


def _empty(path: Path) -> None:
    path.touch()


def _one_byte(path: Path) -> None:
    path.write_bytes(b"\x80")


def _in_a_file(path: Path) -> None:
    path.symlink_to(Path(__file__) / "weights.pth")


def _cut(path: Path) -> None:
    torch.save(net().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-200])


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": np.zeros(3)}, protocol=2))


def _no_tensors(path: Path) -> None:
    torch.save({"epoch": 3, "history": [1.0, 2.0]}, path)


def _nothing(path: Path) -> None: ...


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
        (_junk, "is not a file of weights, or is damaged"),
        (_text, "is not a file of weights, or is damaged"),
        (_one_byte, "is not a file of weights, or is damaged"),
        (_empty, "is empty"),
        (_in_a_file, "can't be read\n  cause  Not a directory"),
        (_cut, "can't be read as weights"),
        (_pickle, ""),
        (_no_tensors, "holds no weights\n  given    a dict of epoch, history"),
        (_nothing, "does not exist"),
        (Path.mkdir, "is a folder"),
    ],
)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_what_is_no_file_of_weights_is_named(tmp_path: Path, make: Any, text: str, suffix: str) -> None:
    path = tmp_path / f"weights{suffix}"
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
