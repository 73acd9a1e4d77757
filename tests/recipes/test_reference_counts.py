"""Counts, names and shapes of all networks, and decoding of text, are the references', in every clone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from samebits.recipes.classify.config import ModelConfig as ClassifyModel
from samebits.recipes.classify.model import build_model
from samebits.recipes.pose.config import ModelConfig as PoseModel
from samebits.recipes.pose.model import HigherHRNet
from samebits.recipes.text.alphabet import Alphabet
from samebits.recipes.text.recipe import crnn
from tests.fixtures.make import digest

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
