"""Every recipe and preset that comes with Samebits can be found, loads, and is explained."""

import re
from pathlib import Path

import pytest

from samebits.config.describe import settings
from samebits.recipes import catalog

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted((ROOT / "src/samebits/recipes").glob("*/presets/*.yaml"))
RECIPES = sorted(path.parent for path in (ROOT / "src/samebits/recipes").glob("*/config.py"))


def _name(path: Path) -> str:
    return f"{path.parent.parent.name}/{path.stem}" if path.suffix else path.name


@pytest.mark.parametrize("path", PRESETS, ids=_name)
def test_a_preset_loads_under_its_full_name(path: Path) -> None:
    source = catalog.find(_name(path))
    config = source.load().config
    assert config.recipe == path.parent.parent.name


@pytest.mark.parametrize("path", PRESETS, ids=_name)
def test_the_first_line_of_a_preset_is_its_description(path: Path) -> None:
    assert re.match(r"# \S+ \S+", path.read_text().splitlines()[0])


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_a_recipe_has_a_default_preset_and_a_page_with_a_picture(folder: Path) -> None:
    assert (folder / "presets" / f"{folder.name}.yaml").is_file()
    assert catalog.find(folder.name).preset_name == folder.name
    page = (folder / "README.md").read_text()
    assert re.search(r"!\[[^\]]+\]\([^)]+\)", page), "one picture"


@pytest.mark.parametrize("folder", RECIPES, ids=_name)
def test_every_setting_is_explained(folder: Path) -> None:
    model = catalog.find(folder.name).config_class
    unexplained = [".".join(map(str, setting.path)) for setting in settings(model) if not setting.meaning]
    assert not unexplained


def test_there_are_recipes_and_presets_to_look_at() -> None:
    assert RECIPES
    assert {"digits", "mnist", "tutorial"} <= {path.stem for path in PRESETS}
