"""Pretrained weights, in the formats of common training scripts."""

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from samebits.errors import CheckpointError
from samebits.storage.pretrained import load_pretrained, read_state


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
    """A checkpoint of a training script: weights, and all values that it needs to resume."""
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
    assert rows["weights"].startswith("8 of 8 tensors, ")


def test_safetensors_are_read_too(tmp_path: Path) -> None:
    state = net(fill=0.5).state_dict()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.safetensors")
    assert set(read_state(tmp_path / "a.safetensors")) == set(state)
    model = net()
    load_pretrained(model, tmp_path / "a.safetensors")
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["a.pth", "a.bin", "without_an_ending"])
def test_safetensors_are_read_whatever_their_name(tmp_path: Path, name: str) -> None:
    state = net(fill=0.5).state_dict()
    save_file(state, tmp_path / name)
    assert load_pretrained(net(), tmp_path / name)["weights"].startswith("8 of 8 tensors, ")
    # The length of a header may begin as a zip file does: 0x4b50 is PK.
    content = (tmp_path / name).read_bytes()
    size = int.from_bytes(content[:8], "little")
    (tmp_path / name).write_bytes(
        (0x4B50).to_bytes(8, "little") + content[8 : 8 + size].ljust(0x4B50) + content[8 + size :]
    )
    assert load_pretrained(net(), tmp_path / name)["weights"].startswith("8 of 8 tensors, ")


def test_a_file_of_torch_is_read_though_its_name_ends_in_safetensors(tmp_path: Path) -> None:
    torch.save(net(fill=0.5).state_dict(), tmp_path / "a.safetensors")
    assert load_pretrained(net(), tmp_path / "a.safetensors")["weights"].startswith("8 of 8 tensors, ")


@pytest.mark.parametrize("wrap", [nn.Identity, nn.DataParallel, torch.compile], ids=["bare", "parallel", "compiled"])
def test_the_weights_of_an_averaged_model_are_loaded(tmp_path: Path, wrap: Any) -> None:
    model = net(fill=0.5) if wrap is nn.Identity else wrap(net(fill=0.5))
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.save({"step": 3, "model": average.state_dict()}, tmp_path / "a.pth")
    loaded = net()
    rows = load_pretrained(loaded, tmp_path / "a.pth")
    assert list(rows) == ["weights"]
    assert rows["weights"].startswith("8 of 8 tensors, ")
    assert (loaded.state_dict()["fc.weight"] == 0.5).all()
    other = torch.optim.swa_utils.AveragedModel(model)
    load_pretrained(other, tmp_path / "a.pth")  # into such a model too


def test_what_does_not_fit_is_left_as_it_was_and_reported(tmp_path: Path) -> None:
    state = net(1000, fill=0.5).state_dict()
    del state["conv.bias"], state["bn.num_batches_tracked"]
    state["aux.weight"], state["aux.bias"] = torch.zeros(3), torch.zeros(3)
    torch.save(state, tmp_path / "a.pth")
    model = net(5, fill=1.0)
    rows = load_pretrained(model, tmp_path / "a.pth", skip=["bn.running_*"])
    assert rows == {
        "weights": f"3 of 8 tensors, 116 values, from {tmp_path / 'a.pth'}",
        "other shape": "fc.weight (1000, 4) in the file, (5, 4) here\nfc.bias (1000) in the file, (5) here",
        "skipped": "bn (running_mean, running_var)",
        "missing": "conv (bias)",
        "not used": "aux (weight, bias)",
    }
    loaded = {name for name, tensor in model.state_dict().items() if (tensor == 0.5).all()}
    assert loaded == {"conv.weight", "bn.weight", "bn.bias"}
    assert all((tensor == 1).all() for name, tensor in model.state_dict().items() if name not in loaded)


def test_the_numbers_of_what_was_loaded_and_what_was_not_add_up(tmp_path: Path) -> None:
    model = nn.Sequential(*(net() for _ in range(5)))
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(("0.", "1.conv"))}
    state["1.conv.weight"] = torch.zeros(1)
    torch.save({**state, "9.bn.num_batches_tracked": torch.tensor(3)}, tmp_path / "a.pth")
    rows = load_pretrained(model, tmp_path / "a.pth", skip=["0.bn.*", "1.fc.*", "2.*"])
    assert 5 + 1 + 14 + 20 == 40
    assert rows["weights"].startswith("5 of 40 tensors, ")
    assert rows["other shape"].startswith("1.conv.weight (1) in the file")
    assert rows["skipped"].startswith("14 tensors: ")
    assert rows["missing"].startswith("20 tensors: ")
    assert "num_batches_tracked" not in str(rows)
    assert "not used" not in rows


def test_batch_norms_counters_are_loaded_though_not_counted(tmp_path: Path) -> None:
    torch.save({**net().state_dict(), "bn.num_batches_tracked": torch.tensor(7)}, tmp_path / "a.pth")
    model = net()
    load_pretrained(model, tmp_path / "a.pth")
    assert model.bn.num_batches_tracked == 7


def test_a_frozen_parameter_that_the_file_lacks_is_refused_and_nothing_loaded(tmp_path: Path) -> None:
    model = net(fill=0.0)
    next(model.parameters()).requires_grad_(False)
    first, *_ = (name for name, _ in model.named_parameters())
    state = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    torch.save({f"backbone.{name}": tensor for name, tensor in state.items() if name != first}, tmp_path / "a.pth")
    with pytest.raises(CheckpointError, match="lacks 1 of the 1 tensors that are frozen"):
        load_pretrained(model, tmp_path / "a.pth")
    assert not any(parameter.any() for parameter in model.parameters())
    torch.save({f"backbone.{name}": tensor for name, tensor in state.items()}, tmp_path / "a.pth")
    load_pretrained(model, tmp_path / "a.pth")
    assert all(parameter.all() for parameter in model.parameters())


@pytest.mark.parametrize("prefix", ["1.", "backbone.", "model.net."])
def test_a_prefix_of_all_names_without_which_they_fit_is_removed_and_reported(tmp_path: Path, prefix: str) -> None:
    state = {f"module.{prefix}{name}": tensor for name, tensor in net(1000, fill=0.5).state_dict().items()}
    torch.save({**state, f"module.{prefix}aux": torch.zeros(3)}, tmp_path / "a.pth")
    model = net()
    rows = load_pretrained(model, tmp_path / "a.pth")
    assert rows["weights"] == f'6 of 8 tensors, 128 values, from {tmp_path / "a.pth"}, its names without "{prefix}"'
    assert rows["not used"] == "aux"
    assert (model.conv.weight == 0.5).all()


def test_a_prefix_that_is_not_of_all_names_or_not_in_the_way_stays(tmp_path: Path) -> None:
    state = net(fill=0.5).state_dict()
    two = {f"backbone.{name}": tensor for name, tensor in state.items() if name.startswith(("conv", "bn"))}
    torch.save({**two, "head.fc.weight": state["fc.weight"]}, tmp_path / "two.pth")
    with pytest.raises(CheckpointError, match="fits the model") as caught:
        load_pretrained(net(), tmp_path / "two.pth")
    assert "backbone.conv.weight" in caught.value.slots["given"]
    model = nn.ModuleDict({"a": nn.ModuleDict({"a": nn.Linear(2, 2)})})
    torch.save(
        {f"a.a.{name}": torch.zeros_like(tensor) for name, tensor in nn.Linear(2, 2).state_dict().items()},
        tmp_path / "fits.pth",
    )
    assert "names" not in load_pretrained(model, tmp_path / "fits.pth")["weights"].partition(", from")[2]


def test_names_can_be_given_as_the_model_has_them(tmp_path: Path) -> None:
    torch.save({f"backbone.{name}": tensor for name, tensor in net(fill=0.5).state_dict().items()}, tmp_path / "a.pth")
    model = net()
    rows = load_pretrained(model, tmp_path / "a.pth", rename=lambda name: name.removeprefix("backbone."))
    assert rows["weights"].startswith("8 of 8")


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
    assert next(iter(state)) in caught.value.slots["given"]
    assert "conv.weight (4, 3, 3, 3)" in caught.value.slots["allowed"].replace("\n", " ")
    assert "model.name" not in caught.value.slots["fix"], "not every recipe has it"
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
