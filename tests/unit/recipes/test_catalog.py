import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import samebits.recipes
from samebits.config.schema import RunConfig
from samebits.errors import ConfigError
from samebits.recipes.catalog import RecipeSpec, find, list_presets, list_recipes
from samebits.recipes.trust import trust

CONFIG = """
from pydantic import Field
from samebits.config.schema import Settings
from samebits.config.schema import RunConfig

class DataConfig(Settings):
    sides: int = Field(default=3, ge=3, description="corners of a shape")

class Config(RunConfig):
    data: DataConfig = Field(default=DataConfig(), description="which shapes")
"""
RECIPE = "def build(config):\n    return ('parts', config.data.sides)\n"


@pytest.fixture(autouse=True)
def _imports_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None) or ""
        if "pytest" in origin or name.startswith(("samebits.recipes.shapes", "samebits.recipes.waves")):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent == "samebits.recipes" and hasattr(samebits.recipes, child):
                delattr(samebits.recipes, child)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes beside Samebits's own; the test works in tmp_path."""
    monkeypatch.setattr(samebits.recipes, "__path__", [*samebits.recipes.__path__, str(tmp_path / "shelf")])
    monkeypatch.chdir(tmp_path)
    for name, names in {"shapes": ["shapes", "stars", "small"], "waves": ["waves", "small"]}.items():
        folder = tmp_path / "shelf" / name
        (folder / "presets").mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "config.py").write_text(CONFIG)
        (folder / "recipe.py").write_text(RECIPE)
        for number, preset in enumerate(names):
            text = f"# {preset} of {name}\nrecipe: {name}\nepochs: {number + 2}\ndata: {{sides: {number + 3}}}\n"
            (folder / "presets" / f"{preset}.yaml").write_text(text)
    return tmp_path


def config_of(source: RecipeSpec, *overrides: str) -> RunConfig:
    return source.load(overrides).config


def built(source: RecipeSpec, *overrides: str) -> Any:
    """What a test's own `build` gave, which is anything but Parts."""
    return source.build(config_of(source, *overrides), {})


def refused(name: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        find(name)
    return caught.value


def test_recipes_and_their_presets_are_listed_the_default_first(shelf: Path) -> None:
    assert {"mnist", "shapes", "waves"} <= set(list_recipes())
    assert [preset.name for preset in list_presets("shapes")] == ["shapes", "small", "stars"]
    assert list_presets("shapes")[2].meaning == "stars of shapes"


@pytest.mark.parametrize(
    ("name", "recipe", "preset", "epochs"),
    [
        ("shapes", "shapes", "shapes", 2),
        ("shapes/stars", "shapes", "stars", 3),
        ("stars", "shapes", "stars", 3),
        ("waves/small", "waves", "small", 3),
        ("waves", "waves", "waves", 2),
    ],
)
def test_a_recipe_or_preset_is_found_by_name(shelf: Path, name: str, recipe: str, preset: str, epochs: int) -> None:
    source = find(name)
    config = config_of(source)
    assert (source.recipe, source.preset_name, source.name) == (recipe, preset, preset)
    assert (config.recipe, config.epochs) == (recipe, epochs)
    assert built(source, "data.sides=9") == ("parts", 9)


@pytest.mark.parametrize(
    ("name", "nearest"), [("shape", "shapes"), ("shapes/star", "shapes/stars"), ("starts", "stars"), ("qqq", None)]
)
def test_an_unknown_name_lists_what_there_is(shelf: Path, name: str, nearest: str | None) -> None:
    error = refused(name)
    assert error.what == f"there is no recipe or preset called {name}"
    no_name = "Use one of these, a YAML file (.yaml) or a recipe file (.py)."
    assert error.slots["fix"] == (no_name if nearest is None else f"Use {nearest}.")
    recipes, presets = (set(names.replace(",", " ").split()) for names in error.slots["allowed"].split("presets:"))
    assert {"recipes:", "mnist", "shapes", "waves"} <= recipes
    assert {"shapes/stars", "shapes/small", "waves/small"} <= presets
    assert all(len(line) <= 80 for line in str(error).splitlines())


@pytest.mark.parametrize(
    ("file", "name", "what", "slots"),
    [
        ("", "small", "several recipes have a preset called small", {"fix": "Use shapes/small or waves/small."}),
        ("run/config.yaml", "run", "there is no recipe or preset called run",
         {"cause": "run is a run folder", "fix": "Resume it with --run-dir run --resume auto"}),
        ("mine.yaml", "mien.yaml", "there is no file mien.yaml", {"fix": "Use mine.yaml."}),
        ("mine.yaml", "nowhere/mine.yaml", "there is no file nowhere/mine.yaml",
         {"cause": "there is no folder nowhere either"}),
        ("folder.py/1", "folder.py", "'folder.py' can't be read: Is a directory", {}),
    ],
)  # fmt: skip
def test_a_name_of_no_recipe_or_of_two_is_refused_with_what_it_may_mean(
    shelf: Path, file: str, name: str, what: str, slots: dict[str, str]
) -> None:
    if file:
        (shelf / file).parent.mkdir(exist_ok=True)
        (shelf / file).write_text("recipe: shapes")
    error = refused(name)
    assert error.what == what
    assert {slot: error.slots[slot] for slot in slots} == slots


def test_a_folder_of_images_is_no_misspelt_name(shelf: Path) -> None:
    (shelf / "shape").mkdir()
    assert "samebits train classify data.root=shape" in refused("shape").slots["fix"]


def test_a_yaml_file_goes_over_the_recipes_default_preset(shelf: Path) -> None:
    (shelf / "my.yaml").write_text("recipe: shapes\ndata: {sides: 7}\n")
    source = find("my.yaml")
    loaded = source.load()
    assert (source.name, source.recipe, source.preset_name) == ("my", "shapes", "shapes")
    assert (loaded.config.epochs, loaded.config.recipe) == (2, "shapes")
    assert loaded.diff == {"data": {"sides": 7}}


def test_a_yaml_file_can_go_over_another_preset(shelf: Path) -> None:
    (shelf / "my.yaml").write_text("recipe: shapes/stars\nseed: 5\n")
    config = config_of(find(str(shelf / "my.yaml")))
    assert (config.epochs, config.seed, config.recipe) == (3, 5, "shapes")


def test_a_resolved_config_finds_its_recipe_again(shelf: Path) -> None:
    from samebits.config.document import to_yaml

    source = find("stars")
    first = source.load(["seed=3"])
    (shelf / "config.yaml").write_text(to_yaml(first.config.model_dump(mode="json")))
    assert config_of(find("config.yaml")) == first.config


def test_a_wrong_value_in_a_preset_or_file_has_its_line(shelf: Path) -> None:
    (shelf / "my.yaml").write_text("recipe: shapes\n\ndata:\n  sides: 2\n")
    with pytest.raises(ConfigError, match=r"data\.sides can't be 2\n.*my\.yaml:4"):
        config_of(find("my.yaml"))


def test_a_recipe_file_is_used_with_its_own_settings_and_neighbors(shelf: Path) -> None:
    folder = shelf / "project"
    folder.mkdir()
    (folder / "corners.py").write_text("EXTRA = 100\n")
    (folder / "recipe.py").write_text(
        CONFIG
        + "PRESET = {'epochs': 4, 'data': {'sides': 5}}\n"
        + "def build(config):\n    import corners\n    return config.data.sides + corners.EXTRA\n"
    )
    source = find("project/recipe.py")
    loaded = source.load(["seed=2"])
    assert source.name == "project"
    assert loaded.config.recipe == source.recipe == str(folder / "recipe.py")
    assert (loaded.config.epochs, loaded.diff) == (4, {"seed": 2})
    assert built(source) == 105


def test_a_recipe_file_needs_only_build(shelf: Path) -> None:
    (shelf / "tiny.py").write_text("def build(config):\n    return config.epochs\n")
    source = find("tiny.py")
    assert source.name == "tiny"
    assert source.config_class is RunConfig
    assert built(source) == 10


def test_a_yaml_file_names_a_recipe_file_beside_it(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shelf / "project").mkdir()
    (shelf / "project" / "tiny.py").write_text("def build(config):\n    return config.epochs\n")
    (shelf / "project" / "my.yaml").write_text("recipe: tiny.py\nepochs: 6\n")
    trust(shelf / "project" / "tiny.py")
    assert config_of(find("project/my.yaml")).epochs == 6
    assert find("project/my.yaml").recipe == str(shelf / "project" / "tiny.py")


def test_two_recipe_files_of_one_name_do_not_mix(shelf: Path) -> None:
    for number in (1, 2):
        (shelf / f"p{number}").mkdir()
        (shelf / f"p{number}" / "recipe.py").write_text(f"def build(config):\n    return {number}\n")
    sources = [find(f"p{number}/recipe.py") for number in (1, 2, 1, 2)]
    assert [built(source) for source in sources] == [1, 2, 1, 2]


def test_a_recipe_file_called_like_a_standard_module_leaves_that_alone(shelf: Path) -> None:
    import json

    (shelf / "json.py").write_text("def build(config):\n    return 1\n")
    assert built(find("json.py")) == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("file", "text", "what", "given"),
    [
        ("my.yaml", "epochs: 3", "my.yaml does not name a recipe", None),
        ("my.yaml", "epochs: 3\nrecipe: 7", "my.yaml does not name a recipe", "my.yaml:2: recipe: 7"),
        ("my.yaml", "recipe: a.yaml", "recipe cannot be the YAML file a.yaml", "my.yaml:1: recipe: a.yaml"),
        ("my.yaml", "\nrecipe: shaps", "there is no recipe or preset called shaps", "my.yaml:2"),
        ("my.yaml", "recipe: none.py", "there is no file none.py", "my.yaml:1"),
        ("bad.py", "x = 1\n", "bad.py is not a recipe: it defines no build", None),
        ("bad.py", "Config = 3\ndef build(config): ...\n", "Config in bad.py is not a subclass of RunConfig", None),
        ("bad.py", "PRESET = 3\ndef build(config): ...\n", "PRESET in bad.py is a int, not a dict", None),
        ("bad.py", "x = 1\ndef build(config:\n", "bad.py can't be imported: SyntaxError", "bad.py:2"),
        ("bad.py", "\nimport not_there\n", "bad.py can't be imported: ModuleNotFoundError", "bad.py:2"),
        ("bad.py", "\n\n1 / 0\n", "bad.py can't be imported: ZeroDivisionError", "bad.py:3"),
        ("bad.py", "\nimport sys\nsys.exit()\n", "bad.py can't be imported: SystemExit", "bad.py:3"),
    ],
)
def test_a_file_that_can_not_be_used_as_a_recipe_is_refused_with_the_reason(
    shelf: Path, file: str, text: str, what: str, given: str | None
) -> None:
    (shelf / file).write_text(text)
    error = refused(file)
    assert (error.what, error.slots.get("given", error.slots.get("where"))) == (what, given)


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed as dist\ndist.init_process_group()\nloss.backward()\n",
        "1 / 0\nloss.backward()\n",
        "def main():\n    loss.backward()\nif __name__ == '__main__':\n    main()\n",
    ],
)
def test_a_training_script_is_not_run_and_the_command_for_it_is_named(shelf: Path, text: str) -> None:
    (shelf / "my train.py").write_text(text)
    error = refused("my train.py")
    assert error.what == "my train.py is a training script, not a recipe, which defines build"
    assert error.slots["fix"].endswith(
        "  samebits launch --nproc-per-node 2 --global-batch 32 --micro-batch 16 'my train.py'"
    )


def test_a_recipe_with_a_backward_pass_of_its_own_is_a_recipe(shelf: Path) -> None:
    (shelf / "own.py").write_text("def penalty(loss):\n    loss.backward()\ndef build(config):\n    return 2\n")
    assert built(find("own.py")) == 2


def test_a_recipe_that_keeps_facts_is_built_with_them(shelf: Path) -> None:
    text = (
        "def dataset_info(config):\n    return {'from': 'data'}\n"
        "def build(config, dataset_info):\n    return dict(dataset_info)\n"
    )
    (shelf / "shelf" / "waves" / "recipe.py").write_text(text)
    source = find("waves")
    config = config_of(source)
    assert source.dataset_info(config) == {"from": "data"}
    parts: Any = source.build(config, {"from": "run"})
    assert parts == {"from": "run"}
    assert built(source) == {}


def test_a_recipe_without_facts_is_built_by_its_settings_alone(shelf: Path) -> None:
    source = find("shapes")
    assert source.dataset_info(config_of(source)) == {}
    parts: Any = source.build(config_of(source), {})
    assert parts == ("parts", 3)
