from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

import samebits
from samebits.config.describe import settings
from samebits.config.load import load, mapping_layer
from samebits.config.renamed import renamed_settings, with_present_names
from samebits.config.schema import RunConfig
from samebits.config.sections import Settings
from samebits.errors import ConfigError
from samebits.recipes.catalog import find, list_recipes


class DataConfig(Settings):
    val_fraction: float = Field(default=0.2, description="share of the samples that are validated on")


class Config(RunConfig):
    RENAMED: ClassVar[Mapping[str, str]] = {"data.eval_share": "data.val_fraction", "former.part": "data.val_fraction"}

    data: DataConfig = Field(default=DataConfig(), description="which samples")


def check(error: ConfigError, given: str) -> None:
    assert error.what == "watch.drift_every was renamed to watch.replica_check_every"
    assert error.slots["fix"].startswith("Use watch.replica_check_every.")
    assert given in error.slots["given"]


def test_a_former_name_on_the_command_line_is_refused_with_the_present_one() -> None:
    found = find("digits")
    with pytest.raises(ConfigError) as caught:
        load(found.config_class, found.layers, ["watch.drift_every=2 epochs"])
    check(caught.value, "on the command line: watch.drift_every=2 epochs")


@pytest.mark.parametrize("name", ["my.yaml", "config.yaml"])
def test_a_former_name_in_a_yaml_file_is_refused_with_the_present_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("recipe: mnist\nwatch:\n  drift_every: 1 epoch\n")
    found = find(str(tmp_path / name))
    with pytest.raises(ConfigError) as caught:
        load(found.config_class, found.layers)
    check(caught.value, f"{name}:3")


def test_a_former_name_in_python_is_refused_with_the_present_one() -> None:
    with pytest.raises(ConfigError) as caught:
        samebits.train("digits", {"watch": {"drift_every": None}})
    check(caught.value, "watch.drift_every")


@pytest.mark.parametrize("values", [{"data": {"eval_share": 0.1}}, {"former": {"part": 0.1}}])
def test_a_recipe_names_the_former_names_of_its_own_settings(values: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ConfigError, match=r"was renamed to data\.val_fraction"):
        load(Config, [mapping_layer({"recipe": "mine", **values}, "in a test")])
    assert with_present_names(Config, values)["data"] == {"val_fraction": 0.1}


def test_the_present_name_wins_over_the_former_one() -> None:
    values = {"data": {"eval_share": 0.1, "val_fraction": 0.3}, "watch": {"drift_every": None}}
    assert with_present_names(Config, values) == {"data": {"val_fraction": 0.3}, "watch": {"replica_check_every": None}}
    assert "eval_share" in values["data"], "what was passed in stays as it is"


def test_damaged_settings_keep_their_form() -> None:
    assert with_present_names(Config, {"watch": 3, "data": [1]}) == {"watch": 3, "data": [1]}


def test_every_present_name_in_the_tables_is_a_setting_and_no_former_one_is() -> None:
    for name in list_recipes():
        model = find(name).config_class
        known = {setting.path for setting in settings(model)}
        for old, new in renamed_settings(model).items():
            assert new in known
            assert old not in known
