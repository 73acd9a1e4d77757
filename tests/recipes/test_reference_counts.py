"""Parameter counts, names and shapes of all networks are the references', in every clone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.recipes.classify.config import ModelConfig as ClassifyModel
from lockstep.recipes.classify.model import build_model
from lockstep.recipes.pose.config import ModelConfig as PoseModel
from lockstep.recipes.pose.model import HigherHRNet
from lockstep.recipes.text.model import crnn
from tests.fixtures.make import digest

KNOWN = json.loads((Path(__file__).parents[1] / "fixtures" / "parity" / "models.json").read_text())
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
