"""Pretrained weights and frozen parts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samebits.engine.parts import Parts
from samebits.errors import CheckpointError, ConfigError
from samebits.optim.build import optimizer
from samebits.recipes.backbones import backbone_of, frozen_row
from samebits.recipes.classify.config import Config, ModelConfig
from samebits.recipes.classify.model import build_model
from samebits.recipes.classify.recipe import build


def parts_of(model: dict[str, Any]) -> Parts:
    torch.manual_seed(0)
    dataset_info = {"classes": list("abcde"), "skipped": {}, "train": {}, "held_out": {}, "held_out_from": None}
    model = {"name": "resnet18", **model}
    return build(
        Config.model_validate({"recipe": "classify", "data": {"root": "pictures"}, "model": model}), dataset_info
    )


def test_a_frozen_backbone_stays_as_it_is_with_its_statistics() -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="resnet18", freeze="backbone"), 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    update = optimizer(model, Config(recipe="classify", optim={"lr": 0.1, "weight_decay": 0.1}).optim)
    for _ in range(2):
        update.zero_grad()
        F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
        update.step()
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["fc.weight", "fc.bias"]
    row = frozen_row(model, weights=Path("resnet18.pth"))
    assert row.startswith("11,176,512 of 11,179,077 parameters; trained: fc")


def test_patterns_freeze_a_part() -> None:
    model = build_model(ModelConfig(name="resnet18", freeze=("conv1", "bn1", "layer1.*")), 5)
    frozen = {name.split(".")[0] for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}
    assert frozen_row(build_model(ModelConfig(name="resnet18"), 5), weights=None) == ""
    with pytest.raises(ConfigError, match="conv9"):
        build_model(ModelConfig(name="resnet18", freeze=("conv9",)), 5)


def test_a_network_that_does_not_name_its_head_is_explained() -> None:
    with pytest.raises(ConfigError, match="head of this Sequential is unknown"):
        backbone_of(nn.Sequential(nn.Linear(3, 3)))


def test_weights_of_another_head_start_all_but_the_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = build_model(ModelConfig(name="resnet18"), 1000)
    wrapped = {"epoch": 3, "state_dict": {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}}
    torch.save(wrapped, tmp_path / "resnet18.pth.tar")
    parts = parts_of({"weights": tmp_path / "resnet18.pth.tar", "freeze": "backbone"})
    rows = parts.init_weights(parts.model)
    assert torch.equal(parts.model.state_dict()["layer4.1.conv2.weight"], trained.state_dict()["layer4.1.conv2.weight"])
    assert re.search(r"fc.*1000.*5", str(rows), re.DOTALL)
    torch.save({"other": torch.zeros(3)}, tmp_path / "other.pth")
    parts = parts_of({"weights": tmp_path / "other.pth"})
    with pytest.raises(CheckpointError, match=r"nothing in .*other\.pth fits"):
        parts.init_weights(parts.model)


@pytest.mark.parametrize("freeze", ["backbone", ("layer3.*",)])
def test_what_is_frozen_has_to_be_in_the_file(tmp_path: Path, freeze: Any) -> None:
    path = tmp_path / "resnet18.pth"
    torch.save(build_model(ModelConfig(name="resnet18"), 1000).state_dict(), path)
    parts = parts_of({"name": "resnet34", "weights": path, "freeze": freeze})
    with pytest.raises(CheckpointError, match=r"resnet18\.pth lacks \d+ of the \d+ tensors that are frozen"):
        parts.init_weights(parts.model)


def test_what_is_not_frozen_may_be_missing_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "resnet18.pth"
    smaller = build_model(ModelConfig(name="resnet18"), 1000)
    torch.save(smaller.state_dict(), path)
    parts = parts_of({"name": "resnet34", "weights": path, "freeze": ("conv1", "bn1")})
    assert "missing" in parts.init_weights(parts.model)
    assert torch.equal(parts.model.state_dict()["conv1.weight"], smaller.state_dict()["conv1.weight"])


def test_a_run_that_freezes_untrained_parameters_reports_it() -> None:
    assert "frozen parameters stay random" in parts_of({"freeze": "backbone"}).describe["frozen"]
    assert "random" not in parts_of({"freeze": "backbone", "weights": "resnet18.pth"}).describe["frozen"]
