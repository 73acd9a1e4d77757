"""Pretrained weights by name, from caches that are filled beforehand: no test uses the network."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision.models as zoo
from safetensors.torch import save_file

from samebits.errors import CheckpointError, ConfigError, DataError
from samebits.recipes import backbones as published
from samebits.recipes.backbones import find_published, load_published
from samebits.recipes.classify.config import MakeConfig, ModelConfig
from samebits.recipes.classify.make import make
from samebits.recipes.classify.model import build_model
from tests.runs import samebits

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
