"""Networks of timm in the recipes text, pose and segment: feature maps, pretrained weights, frozen parts."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from samebits.engine.parts import Parts
from samebits.errors import ConfigError
from samebits.recipes.backbones import Backbone, Pyramid, find_backbone
from samebits.recipes.pose.config import Config as PoseConfig
from samebits.recipes.pose.recipe import build as build_pose
from samebits.recipes.segment.config import Config as SegmentConfig
from samebits.recipes.segment.config import ModelConfig
from samebits.recipes.segment.recipe import build as build_segment
from samebits.recipes.segment.recipe import build_model, dataset_info
from samebits.recipes.text.config import Config as TextConfig
from samebits.recipes.text.recipe import build as build_text
from tests.runs import samebits, weights

# timm's own small networks for tests, by kind: convolutions, attention, rotary positions, windows.
KINDS = ["test_convnext", "test_vit", "vit_small_patch16_dinov3", "test_resnet"]


def parts_of(recipe: str, name: str, **model: Any) -> Parts:
    """Build a small network of a recipe on a network of timm."""
    given = {"name": f"timm/{name}", "width": 8, **model}
    if recipe == "pose":
        data = {"size_px": 64, "num_train": 2, "num_eval": 2}
        return build_pose(PoseConfig.model_validate({"recipe": "pose", "data": data, "model": given}), {})
    if recipe == "text":
        data = {"width": 60}
        config = TextConfig.model_validate({"recipe": "text", "data": data, "model": {**given, "num_hidden": 8}})
        return build_text(config, {"alphabet": "0123456789"})
    config = SegmentConfig.model_validate({"recipe": "segment", "data": {"name": "shapes"}, "model": given})
    return build_segment(config, dataset_info(config))


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_network_gives_maps_of_all_recipes_sizes(name: str) -> None:
    model = Pyramid(name, 8).eval()
    with torch.no_grad():
        for height, width in ((64, 96), (32, 60), (96, 64)):
            assert model(torch.zeros(2, 3, height, width)).shape == (2, 8, height // 4, width // 4)


@pytest.mark.parametrize("recipe", ["text", "pose", "segment"])
@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_every_parameter_is_trained_in_each_recipe(recipe: str, name: str) -> None:
    torch.manual_seed(0)
    model = parts_of(recipe, name).model
    shape = (2, 1, 32, 60) if recipe == "text" else (2, 3, 64, 64)
    out = model(torch.randn(shape))
    found = out if recipe == "pose" else [out]
    sum(each.square().sum() for each in found).backward()
    lacking = [key for key, each in model.named_parameters() if each.grad is None]
    assert not lacking, "these would stay as they began"


def test_text_has_a_time_step_for_four_pixels_whatever_the_network() -> None:
    config = TextConfig.model_validate({"recipe": "text", "model": {"name": "timm/test_vit"}})
    for width in (60, 64, 100):
        out = parts_of("text", "test_vit").model(torch.zeros(1, 1, 32, width))
        assert out.shape[1] == config.model.num_steps(width)


def test_the_backbone_alone_is_frozen_and_its_batch_norms_stay() -> None:
    model = parts_of("segment", "test_resnet", freeze="backbone").model
    backbone = find_backbone(model)
    assert not any(each.requires_grad for each in backbone.parameters())
    assert all(each.requires_grad for key, each in model.named_parameters() if "backbone" not in key)
    before = {key: each.clone() for key, each in backbone.named_buffers()}
    model(torch.randn(2, 3, 64, 64))  # the engine trains a model in the modes in which it was built
    assert all(torch.equal(each, before[key]) for key, each in backbone.named_buffers())


@pytest.mark.parametrize("recipe", ["text", "pose", "segment"])
def test_a_file_with_timms_names_is_loaded_into_the_backbone(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state = timm.create_model("test_convnext").state_dict()
    save_file(state, tmp_path / "timm.safetensors")
    parts = parts_of(recipe, "test_convnext", weights=str(tmp_path / "timm.safetensors"))
    rows = parts.init_weights(parts.model)
    backbone = find_backbone(parts.model)
    loaded = {key: each for key, each in backbone.net.named_parameters() if torch.equal(each, state[key])}
    assert len(loaded) == len(list(backbone.net.parameters()))
    assert rows


def test_a_networks_whole_file_is_loaded_too(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = build_model(ModelConfig(name="timm/test_convnext", width=8), 4)
    save_file(model.state_dict(), tmp_path / "whole.safetensors")
    parts = parts_of("segment", "test_convnext", weights=str(tmp_path / "whole.safetensors"))
    parts.init_weights(parts.model)
    assert torch.equal(
        parts.model.get_parameter("pyramid.lateral.0.weight"), model.get_parameter("pyramid.lateral.0.weight")
    )


@pytest.mark.parametrize("recipe", ["segment", "text", "pose"])
def test_an_unknown_network_is_refused_before_training(recipe: str) -> None:
    with pytest.raises(ConfigError, match="timm has no network called convnext_ato") as raised:
        parts_of(recipe, "convnext_ato")
    assert "timm/convnext_atto" in str(raised.value)


@pytest.mark.parametrize("config", [SegmentConfig, TextConfig, PoseConfig])
def test_a_network_of_timm_without_its_prefix_is_no_name(config: Any) -> None:
    with pytest.raises(ValueError, match="must be one of the names below"):
        config.model_validate({"recipe": "x", "model": {"name": "convnext_atto"}})


def test_the_finest_map_has_a_quarter_of_the_resolution() -> None:
    assert [len(Backbone(name).indices) for name in KINDS] == [4, 1, 1, 4]


def test_weights_are_equal_on_one_and_two_processes(tmp_path: Path) -> None:
    command = ["train", "segment_shapes", "data.size_px=64", "data.num_train=24", "data.num_eval=4", "global_batch=8",
               "micro_batch=2", "max_steps=3", "model.name=timm/test_convnext", "optim.layer_decay=0.8"]  # fmt: skip
    hashes = set()
    for procs in (1, 2):
        samebits(*command, "--procs", procs, "--run-dir", tmp_path / f"on{procs}", cwd=tmp_path)
        hashes.add(weights(tmp_path / f"on{procs}"))
    assert len(hashes) == 1
