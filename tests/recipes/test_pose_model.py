import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from samebits.recipes.pose.config import ModelConfig
from samebits.recipes.pose.model import HigherHRNet
from samebits.storage.pretrained import load_pretrained
from tests.recipes.parity import filled, noise, recorded

CONFIGS = ("crowdpose_w32_512", "crowdpose_w48_640", "coco_w32_512", "coco_w48_640")
TINY = ModelConfig(width=8, num_modules=(1, 2, 2), num_blocks=1, deconv_blocks=2)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    """As the fixtures were made: the number decides how sums are split."""
    torch.set_num_threads(2)


@pytest.mark.full
@pytest.mark.parametrize("view", [pytest.param("full", marks=pytest.mark.full), "wide"])
@pytest.mark.parametrize("name", [CONFIGS[0], *(pytest.param(name, marks=pytest.mark.full) for name in CONFIGS[1:])])
@pytest.mark.one_in(3)
def test_the_full_network_equals_the_official_one(parity_folder: Path, name: str, view: str) -> None:
    arrays = np.load(parity_folder / "pose_outputs.npz")
    case, width = f"{name}/{view}", int(name.split("_w")[1][:2])
    num_joints = 14 if name.startswith("crowdpose") else 17
    model = filled(HigherHRNet(ModelConfig(width=width), num_joints)).eval()
    images = noise(arrays[f"{case}/x_shape"], arrays[f"{case}/x_seed"])
    with torch.inference_mode():
        outputs = model(images)
    for stage, output in enumerate(outputs):
        expected = arrays[f"{case}/y{stage}/sample"]
        assert tuple(output.shape) == tuple(arrays[f"{case}/y{stage}/shape"])
        ours = output.reshape(-1)[:: int(arrays[f"{case}/y{stage}/step"])].numpy()
        assert np.abs(ours - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("tag", ["crowdpose", pytest.param("coco", marks=pytest.mark.full)])
def test_a_small_net_evaluates_and_trains_as_the_official_one(parity_folder: Path, tag: str) -> None:
    arrays = np.load(parity_folder / "pose_tiny.npz")
    model = filled(HigherHRNet(TINY, 14 if tag == "crowdpose" else 17))
    images = noise(arrays[f"{tag}/x_shape"], arrays[f"{tag}/x_seed"])

    def check(outputs: list[Tensor], mode: str, tolerance: float) -> None:
        for stage, output in enumerate(outputs):
            ours = output.detach().reshape(-1)[:: int(arrays[f"{tag}/{mode}/y{stage}/step"])].numpy()
            expected = arrays[f"{tag}/{mode}/y{stage}/sample"]
            assert np.abs(ours - expected).max() < tolerance * max(1.0, np.abs(expected).max())

    model.eval()
    with torch.inference_mode():
        check(model(images), "eval", 1e-5)
    # Batch norm over few samples: in float32 rounding decides single ReLUs, on each kind of processor others. The
    # recording has such flips too: they change outputs by 1e-5 and the gradient of a tensor by up to 1%.
    model, images = model.double().train(), images.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        outputs = model(images)
        loss = sum(((output**2).mean() for output in outputs), torch.zeros(()))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        if step:
            continue
        check(outputs, "train", 2e-5)
        large, apart = {}, []
        for name, ours, expected in recorded(gradients, arrays, f"{tag}/train/grad", 64):
            largest = np.abs(expected).max()
            apart.append(np.abs(ours - expected).max() / (largest + 1e-12))
            assert apart[-1] < 2e-2, name
            # Adam's first step is lr * sign(gradient).
            large[name] = np.abs(expected) > 2e-2 * largest
        assert np.median(apart) < 1e-4
        for name, ours, expected in recorded(model.state_dict(), arrays, f"{tag}/train/after", 64):
            where = large.get(name, np.ones(np.shape(ours), bool))
            assert np.allclose(ours[where], expected[where], rtol=1e-5, atol=1e-6), name
    for ours, expected, tolerance in zip(losses, arrays[f"{tag}/train/losses"], (1e-5, 2e-3, 1e-2), strict=True):
        assert ours == pytest.approx(float(expected), rel=tolerance)


def test_a_fresh_net_starts_as_the_official_one(parity_folder: Path) -> None:
    official = json.loads((parity_folder / "pose_tiny.json").read_text())["coco"]["init_mean_std"]
    torch.manual_seed(1)
    for name, tensor in HigherHRNet(TINY, 17).state_dict().items():
        mean, std = official[name]
        if std == 0:
            assert torch.all(tensor == mean), name
        elif tensor.numel() > 1000:
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
            assert abs(tensor.mean().item()) < 0.2 * std, name


def test_an_official_training_checkpoint_loads_whole(tmp_path: Path) -> None:
    trained, fresh = HigherHRNet(TINY, 14), HigherHRNet(TINY, 14)
    state = {f"module.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"epoch": 300, "state_dict": state}, tmp_path / "official.pth.tar")
    load_pretrained(fresh, tmp_path / "official.pth.tar")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in trained.state_dict().items())


def test_a_classifier_with_the_same_trunk_gives_its_trunk(tmp_path: Path) -> None:
    trained, fresh = HigherHRNet(TINY, 17), HigherHRNet(TINY, 17)
    head = fresh.final_layers[0].weight.clone()
    state = {name: value for name, value in trained.state_dict().items() if not name.startswith(("final", "deconv"))}
    torch.save({**state, "classifier.weight": torch.zeros(1000, 2048)}, tmp_path / "hrnet.pth")
    load_pretrained(fresh, tmp_path / "hrnet.pth")
    assert torch.equal(fresh.conv1.weight, trained.conv1.weight)
    assert torch.equal(fresh.final_layers[0].weight, head)
