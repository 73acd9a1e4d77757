"""Weights from elsewhere, in the forms that people keep them in."""

from __future__ import annotations

import argparse
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.engine.pretrained import load_pretrained, read_state
from lockstep.errors import CheckpointError


def net(num_classes: int = 5, fill: float | None = None) -> nn.Sequential:
    model = nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), pool=nn.Flatten(), fc=nn.Linear(4, num_classes))
    )
    if fill is not None:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(fill)
    return model


def training_script(state: dict[str, Tensor]) -> dict[str, Any]:
    """What a training script saves: weights, and all that it needs to go on."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    return {"epoch": 3, "best": 0.5, "args": {"lr": 0.1}, "optimizer": optimizer.state_dict(), "state_dict": state}


FORMS = {
    "bare": lambda state: state,
    "state_dict": training_script,
    "model": lambda state: {"model": state, "step": torch.tensor(3)},
    "model.state_dict": lambda state: {"model": {"state_dict": state, "name": "net"}},
    "parallel": lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
    "parallel and compiled": lambda state: {
        "state_dict": {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()}
    },
    "ordered": OrderedDict,
}


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".pth.tar", ".old.pth"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_found_however_they_are_wrapped(tmp_path: Path, form: str, suffix: str) -> None:
    state = net(fill=0.25).state_dict()
    path = tmp_path / f"weights{suffix}"
    torch.save(FORMS[form](state), path, _use_new_zipfile_serialization=suffix != ".old.pth")
    model = net(fill=1.0)
    rows = load_pretrained(model, path)
    assert all((tensor == (0 if tensor.dtype == torch.int64 else 0.25)).all() for tensor in model.state_dict().values())
    assert list(rows) == ["weights"]
    assert rows["weights"].startswith("9 of 9 tensors, ")


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    state = net(fill=0.5).state_dict()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.safetensors")
    assert set(read_state(tmp_path / "a.safetensors")) == set(state)
    model = net()
    load_pretrained(model, tmp_path / "a.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_what_does_not_fit_is_left_as_it_was_and_said(tmp_path: Path) -> None:
    state = net(1000, fill=0.5).state_dict()
    del state["conv.bias"], state["bn.num_batches_tracked"]
    state["aux.weight"], state["aux.bias"] = torch.zeros(3), torch.zeros(3)
    torch.save(state, tmp_path / "a.pth")
    model = net(5, fill=1.0)
    rows = load_pretrained(model, tmp_path / "a.pth", skip=["bn.running_*"])
    assert rows == {
        "weights": f"3 of 9 tensors, 116 values, from {tmp_path / 'a.pth'}",
        "other shape": "fc.weight (1000, 4) in the file, (5, 4) here\nfc.bias (1000) in the file, (5) here",
        "skipped": "bn (running_mean, running_var)",
        "missing": "conv (bias)",
        "not used": "aux (weight, bias)",
    }
    loaded = {name for name, tensor in model.state_dict().items() if (tensor == 0.5).all()}
    assert loaded == {"conv.weight", "bn.weight", "bn.bias"}
    assert all((tensor == 1).all() for name, tensor in model.state_dict().items() if name not in loaded)


def test_names_can_be_given_as_the_model_has_them(tmp_path: Path) -> None:
    torch.save({f"backbone.{name}": tensor for name, tensor in net(fill=0.5).state_dict().items()}, tmp_path / "a.pth")
    model = net()
    rows = load_pretrained(model, tmp_path / "a.pth", rename=lambda name: name.removeprefix("backbone."))
    assert rows["weights"].startswith("9 of 9")


def test_the_layout_and_the_type_of_the_model_stay(tmp_path: Path) -> None:
    torch.save({name: tensor.half() for name, tensor in net(fill=0.5).state_dict().items()}, tmp_path / "half.pth")
    model = net().to(memory_format=torch.channels_last)
    load_pretrained(model, tmp_path / "half.pth")
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.dtype == torch.float32
    assert model.bn.num_batches_tracked.dtype == torch.int64
    assert (model.conv.weight == 0.5).all()


@pytest.mark.parametrize(
    "state",
    [
        {"encoder.weight": torch.zeros(3)},
        {"conv.weight": torch.zeros(1, 2, 3)},
        {"bn.num_batches_tracked": torch.tensor(3)},
    ],
    ids=["other names", "other shapes", "only a counter"],
)
def test_a_file_that_fits_nothing_is_an_error_and_changes_nothing(tmp_path: Path, state: dict[str, Tensor]) -> None:
    torch.save(state, tmp_path / "a.pth")
    model = net(fill=1.0)
    with pytest.raises(CheckpointError, match=r"nothing in .*a\.pth fits the model") as caught:
        load_pretrained(model, tmp_path / "a.pth")
    assert next(iter(state)) in caught.value.facts["file"]
    assert "conv.weight (4, 3, 3, 3)" in caught.value.facts["model"]
    assert all((tensor == 1).all() for tensor in model.state_dict().values())


def test_what_training_scripts_keep_beside_the_weights_is_no_obstacle(tmp_path: Path) -> None:
    beside = {
        "perf": np.float64(0.5),
        "epoch": np.int64(3),
        "is_best": np.bool_(True),
        "args": argparse.Namespace(lr=0.1, output=Path("out"), nested=argparse.Namespace(a=[np.float32(1)])),
    }
    torch.save({**beside, "state_dict": net().state_dict()}, tmp_path / "a.pth.tar")
    assert len(read_state(tmp_path / "a.pth.tar")) == 9


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
    assert "_spring" in caught.value.facts["found"]
    assert "weights_only=False" in caught.value.facts["do"]


def test_a_whole_model_as_some_people_save_it_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        read_state(tmp_path / "model.pt")


def _junk(path: Path) -> None:
    path.write_bytes(b"<html>404 not found</html>")


def _empty(path: Path) -> None:
    path.touch()


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
        with pytest.raises(CheckpointError):
            read_state(path)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_junk, "is not a file of weights, or is damaged"),
        (_empty, "can't be read as weights"),
        (_cut, "can't be read as weights"),
        (_pickle, ""),
        (_no_tensors, "holds no weights\n  found    a dict of epoch, history"),
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
