"""Pretrained weights by name or from a file, and frozen parts; no test uses the network."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from safetensors.torch import save_file
from torch import nn

from samebits.engine.parts import Parts
from samebits.errors import CheckpointError, ConfigError, DataError
from samebits.optim.build import optimizer
from samebits.recipes import backbones as published
from samebits.recipes.backbones import backbone_of, find_published, frozen_row, load_published
from samebits.recipes.classify.config import Config, MakeConfig, ModelConfig
from samebits.recipes.classify.make import make
from samebits.recipes.classify.model import build_model
from samebits.recipes.classify.recipe import build
from tests.runs import samebits


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


VIT = "timm/vit_tiny_patch16_224"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No host can be connected to."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


def torchvision_file(cache: Path, monkeypatch: pytest.MonkeyPatch, state: dict[str, torch.Tensor]) -> Path:
    """Publish a state_dict as the weights of resnet18, and put it into torch's cache."""
    path = cache / "hub/checkpoints/made.pth"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    path = path.rename(path.with_name(f"resnet18-{sha256[:8]}.pth"))
    weights = zoo.ResNet18_Weights.DEFAULT
    monkeypatch.setattr(weights, "_value_", weights.value.__class__(
        url=f"https://example.invalid/{path.name}", transforms=weights.transforms, meta=weights.meta))  # fmt: skip
    monkeypatch.setenv("TORCH_HOME", str(cache))
    return path


def fill_hub_cache(cache: Path, state: dict[str, torch.Tensor]) -> Path:
    """Put a state_dict into a cache of the Hugging Face Hub, as the published weights of vit_tiny_patch16_224."""
    repository = cache / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    for folder in (repository / "refs", repository / "snapshots/abc"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text("abc", encoding="utf-8")
    save_file(state, repository / "snapshots/abc/model.safetensors")
    return repository / "snapshots/abc/model.safetensors"


@pytest.mark.usefixtures("offline")
def test_torchvisions_weights_come_from_the_cache_by_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    state = zoo.resnet18().state_dict()
    path = torchvision_file(tmp_path, monkeypatch, state)
    info = find_published("resnet18")
    assert json.loads(json.dumps(info))["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert info["source"] == f"https://example.invalid/{path.name}"
    torch.manual_seed(2)
    model = build_model(ModelConfig(name="resnet18"), 5)
    head = model.fc.weight.clone()
    rows = load_published(model, "resnet18", info)
    assert torch.equal(model.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])
    assert torch.equal(model.fc.weight, head)
    assert rows["source"].endswith(f"sha256 {info['sha256']}")
    assert "normalization" not in rows
    with pytest.raises(CheckpointError, match="not the file that the run started with"):
        load_published(model, "resnet18", {**info, "sha256": "0" * 64})
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DataError, match="is damaged"):
        find_published("resnet18")


@pytest.mark.usefixtures("offline")
def test_without_cache_and_network_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(DataError, match="resnet18 are not in the cache and can't be downloaded") as raised:
        find_published("resnet18")
    assert "https://download.pytorch.org/models/resnet18-" in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert not list((tmp_path / "hub/checkpoints").iterdir())


@pytest.mark.usefixtures("offline")
def test_timms_weights_come_from_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    state = timm.create_model("vit_tiny_patch16_224").state_dict()
    file = fill_hub_cache(tmp_path, state)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    info = find_published(VIT)
    model = build_model(ModelConfig(name=VIT), 3)
    rows = load_published(model, VIT, info)
    assert torch.equal(model.blocks[11].attn.qkv.weight, state["blocks.11.attn.qkv.weight"])
    assert rows["normalization"].endswith("set data.mean=[0.5,0.5,0.5] data.std=[0.5,0.5,0.5]")
    del state["blocks.3.attn.qkv.weight"]
    save_file(state, file)
    with pytest.raises(CheckpointError, match=r"does not fit model.name=timm/vit_tiny_patch16_224"):
        load_published(model, VIT, find_published(VIT))


def test_networks_without_published_weights_and_unknown_networks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "check_timm", lambda name: None)
    with pytest.raises(ConfigError, match="publishes no weights of test_byobnet_x"):
        find_published("timm/test_byobnet_x")
    with pytest.raises(ConfigError, match="torchvision has no network called convnext_tini") as raised:
        build_model(ModelConfig(name="torchvision/convnext_tini"), 3)
    assert "torchvision/convnext_tiny" in str(raised.value)
    with pytest.raises(ConfigError, match="has no stochastic depth"):
        build_model(ModelConfig(name="torchvision/vgg11", drop_path=0.1), 3)


@pytest.mark.parametrize("name", ["convnext_tiny", "mobilenet_v3_small", "vit_b_16", "swin_t"])
def test_networks_of_torchvision_have_the_head_that_is_needed(name: str) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name=f"torchvision/{name}", freeze="backbone"), 7)
    trained = {each: parameter.shape for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert {len(shape) and shape[0] for each, shape in list(trained.items())[-2:]} == {7}


@pytest.mark.full
def test_a_run_starts_from_published_weights_and_records_their_sha256(tmp_path: Path) -> None:
    make(MakeConfig(num_per_class=4, size_px=40), tmp_path / "shapes")
    file = fill_hub_cache(tmp_path / "hub", timm.create_model("vit_tiny_patch16_224").state_dict())
    command = ["train", "classify/shapes", f"data.root={tmp_path}/shapes", "data.size_px=224", f"model.name={VIT}",
               "model.weights=pretrained", "max_steps=1", "micro_batch=16", "--procs", 2]  # fmt: skip
    done = samebits(*command, "--run-dir", tmp_path / "run", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "hub"))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sha256 in "".join(done.stdout.split())
    assert json.loads((tmp_path / "run/dataset_info.json").read_text(encoding="utf-8"))["weights"]["sha256"] == sha256
    # Evaluation reads the trained weights, and needs neither cache nor network.
    samebits("eval", tmp_path / "run", cwd=tmp_path, HF_HUB_CACHE=str(tmp_path / "none"), HF_HUB_OFFLINE="1")
