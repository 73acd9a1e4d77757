"""Documented differences from the references, and figures counted by their programs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from samebits.config.schema import OptimConfig
from samebits.optim.schedule import factor
from samebits.recipes.classify.config import ModelConfig as ClassifyModel
from samebits.recipes.classify.model import build_model
from samebits.recipes.pose.config import ModelConfig as PoseModel
from samebits.recipes.pose.model import HigherHRNet
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.recipe import crnn
from tests.fixtures.make import digest

PICTURES, BATCH = 2939, 64  # 3,670 of flower_photos less a fifth of each class; four processes of 16


def tutorial_factor(step: int, steps_per_epoch: int, epochs: int, final_factor: float) -> float:
    """The tutorials' LambdaLR, which is stepped once an epoch."""
    cosine = (1 + math.cos(step // steps_per_epoch * math.pi / epochs)) / 2
    return cosine * (1 - final_factor) + final_factor


def test_the_cosine_is_as_far_from_the_tutorials_as_documented(repo: Path) -> None:
    (row,) = re.findall(
        r"up to ([\d.]+) of the peak learning rate apart \((\d+) epochs of (\d+) steps, `final_factor=([\d.]+)`",
        (repo / "docs/own-images.md").read_text(),
    )
    stated, epochs, per_epoch, final = float(row[0]), int(row[1]), int(row[2]), float(row[3])
    assert per_epoch == math.ceil(PICTURES / BATCH)
    config, steps = OptimConfig(schedule="cosine", final_factor=final), epochs * per_epoch
    pairs = [
        (factor(step, steps, per_epoch, config), tutorial_factor(step, per_epoch, epochs, final))
        for step in range(steps)
    ]
    assert max(abs(ours - theirs) for ours, theirs in pairs) == pytest.approx(stated, abs=5e-5)
    ours, theirs = pairs[-1]
    assert ours == pytest.approx(final)
    assert theirs > final


@pytest.mark.parametrize("name", ["coco_w32_512", "coco_w48_640", "crowdpose_w32_512"])
def test_the_pose_presets_synchronize_batch_norm_as_documented(repo: Path, name: str) -> None:
    recipe = repo / "src/samebits/recipes/pose"
    preset = yaml.safe_load((recipe / f"presets/{name}.yaml").read_text())
    assert preset["batch_norm"] == "sync"
    page = (recipe / "README.md").read_text()
    assert re.search(r"SYNC_BN`\) \| `False`.*`batch_norm: sync`", page)


def test_each_recipe_documents_where_it_differs_from_its_reference(repo: Path) -> None:
    pages = [*(repo / "src/samebits/recipes").glob("*/README.md"), repo / "docs/own-images.md"]
    saying = {page.parent.name for page in pages if "\n## Where it differs from " in page.read_text()}
    assert saying == {"mnist", "text", "pose", "docs"}


FIXTURES = Path(__file__).parents[1] / "fixtures" / "parity"
KNOWN = json.loads((FIXTURES / "models.json").read_text())
CRNN = {"alphabet6736": (6736, 256), "char_std5991": (5991, 256), "small40": (40, 32)}


def _network(name: str) -> nn.Module:
    if name in CRNN:
        num_classes, num_hidden = CRNN[name]
        return crnn(num_classes, 64, num_hidden)
    if name.startswith("resnet"):
        return build_model(ClassifyModel(name=name.removesuffix("_5")), 5)
    return HigherHRNet(PoseModel(width=int(name.split("_w")[1][:2])), 14 if name.startswith("crowdpose") else 17)


def test_all_kinds_of_networks_are_known() -> None:
    assert len(KNOWN) == 9


@pytest.mark.parametrize("name", KNOWN)
def test_a_network_has_the_reference_s_tensors(name: str) -> None:
    with torch.device("meta"):
        model = _network(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == KNOWN[name]["params"]
    assert digest({key: list(value.shape) for key, value in model.state_dict().items()}) == KNOWN[name]["state_sha256"]


def test_labels_are_encoded_and_decoded_as_the_reference_does_in_every_clone() -> None:
    """Characters of our own stand at the places of the reference's."""
    known = json.loads((FIXTURES / "crnn_paths.json").read_text())
    alphabet = Alphabet("".join(map(chr, range(0x4E00, 0x4E00 + known["alphabet_len"]))))
    assert alphabet.num_classes == known["num_classes"]
    assert len(known["decode"]) == 24
    for case in known["decode"]:
        paths = np.zeros((len(case["paths"]), max(map(len, case["paths"]))), np.int64)  # 0: the blank
        for row, path in zip(paths, case["paths"], strict=True):
            row[: len(path)] = path
        texts = ["".join(chr(0x4E00 + step - 1) if step else "-" for step in text) for text in case["classes"]]
        if not case["raw"]:
            assert alphabet.decode_paths(paths) == texts
            assert [alphabet.encode(text).tolist() for text in texts] == case["classes"]
    toy = Alphabet(known["toy"]["alphabet"])
    encoded = [step for text in known["toy"]["list"] for step in toy.encode(text).tolist()]
    assert encoded == known["toy"]["list_encoded"][0]
