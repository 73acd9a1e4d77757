"""Settings of classify that can't be are refused where they are given: before torch is imported or a file is opened."""

from pathlib import Path

import pytest
import torchvision

from samebits.config.document import mapping_layer
from samebits.config.load import load
from samebits.errors import ConfigError
from samebits.recipes.classify.config import RESNETS, Config


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Config, [mapping_layer({"recipe": "classify/classify"}, "preset", is_preset=True)], settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["resnet-34", "resnet43", "efficientnet_b0", "resnet34.pth"])
def test_a_network_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    said = refused(f"model.name={name}")
    assert f'model.name can\'t be "{name}"' in said
    assert all(each in said for each in (*RESNETS, "timm/NAME"))
    assert max(map(len, said.splitlines())) <= 80
    assert "Use model.name=resnet34." in refused("model.name=resnet-34")


def test_every_network_that_is_named_is_torchvisions() -> None:
    assert all(callable(getattr(torchvision.models, name)) for name in RESNETS)


@pytest.mark.parametrize(
    ("setting", "meaning"),
    [
        ("data.mean=[123.7,116.3,103.5]", "Mean of red, green and blue for normalization"),
        ("data.std=[58.4,57.1,57.4]", "Standard deviation of red, green and blue for normalization"),
    ],
)
def test_means_of_bytes_are_refused(setting: str, meaning: str) -> None:
    text = " ".join(refused(setting).split())
    assert meaning in text
    assert "1" in text.partition("allowed")[2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.root=a", "data.train=b", "data.eval=c"], "Set one of them"),
        (["data.train=b"], "train requires eval"),
        (["data.eval=c"], "eval requires train or root"),
    ],
)
def test_places_that_do_not_fit_together_are_explained(settings: list[str], said: str) -> None:
    assert said in refused(*settings)


def test_a_validation_set_can_be_set_besides_the_training_set() -> None:
    for first in ("root", "train"):
        layer = mapping_layer({"recipe": "classify/classify"}, "preset", is_preset=True)
        data = load(Config, [layer], [f"data.{first}=a", "data.eval=b"]).config.data
        assert (data.root or data.train, data.eval) == (Path("a"), Path("b"))
