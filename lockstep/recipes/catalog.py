"""From what a person names (recipe, preset, YAML file or their own Python file) to settings and a recipe.

A recipe is a folder beside this file with `config.py` (class `Config`, no torch), `recipe.py` (`build(config)` returns
its `Parts`; if it also defines `dataset_info(config)`, `build(config, dataset_info)`) and `presets/*.yaml`. The default
preset has the recipe's name.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import lockstep.recipes
from lockstep.config import describe
from lockstep.config.explain import wrapped
from lockstep.config.load import Layer, leaves, mapping_layer, read_layer, short_path
from lockstep.config.renamed import with_present_names
from lockstep.config.schema import RunConfig
from lockstep.errors import ConfigError
from lockstep.recipes.recipe_file import check_file, expanded, load_file
from lockstep.recipes.trust import check_trusted, read_recipe

if TYPE_CHECKING:
    from lockstep.engine.parts import Parts


@dataclass(frozen=True)
class RecipeSpec:
    """Where a run's settings and its recipe come from.

    Attributes:
        name: A short name for people and folders: "digits", "my" for my.yaml.
        recipe: A recipe's name or the absolute path of a recipe file; stands in the config, so that a run folder's
            config alone is enough to find it again.
        preset_name: The preset that the settings start from; None: the recipe's own defaults.
        layers: The settings, for `config.load`.
        config_class: The recipe's `Config`.
    """

    name: str
    recipe: str
    preset_name: str | None
    layers: tuple[Layer, ...]
    config_class: type[RunConfig]

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        """What the recipe reads from its data and the run stores; empty if the recipe defines no `dataset_info`."""
        module = self._module()
        found: Mapping[str, Any] = module.dataset_info(config) if hasattr(module, "dataset_info") else {}
        return found

    def build(self, config: RunConfig, dataset_info: Mapping[str, Any] | None = None) -> Parts:
        """The recipe's parts. Imports the recipe, and torch with it.

        Args:
            config: The settings.
            dataset_info: What the run stores. If None, the recipe reads it from its data.
        """
        module = self._module()
        if not hasattr(module, "dataset_info"):
            parts: Parts = module.build(config)
        else:
            parts = module.build(config, self.dataset_info(config) if dataset_info is None else dataset_info)
        return parts

    def _module(self) -> ModuleType:
        if self.recipe.endswith(".py"):
            module = load_file(Path(self.recipe), None)
            if hasattr(module, "facts") and not hasattr(module, "dataset_info"):
                raise ConfigError(
                    f"{self.recipe} defines facts(config), which is called dataset_info(config) now",
                    fix="Rename the function facts to dataset_info.",
                )
            return module
        return importlib.import_module(f"lockstep.recipes.{self.recipe}.recipe")


@dataclass(frozen=True)
class Preset:
    """A YAML file in a recipe's folder.

    Attributes:
        recipe: The recipe's name.
        name: The file's name without its ending.
        path: The file.
    """

    recipe: str
    name: str
    path: Path

    @property
    def meaning(self) -> str:
        """The comment on the file's first line."""
        first, *_ = self.path.read_text(encoding="utf-8").splitlines() or [""]
        return first.removeprefix("#").strip() if first.startswith("#") else ""


def recipes() -> list[str]:
    """The names of the recipes that come with Lockstep."""
    return sorted(module.name for module in pkgutil.iter_modules(lockstep.recipes.__path__) if module.ispkg)


def presets(recipe: str) -> list[Preset]:
    """A recipe's presets, the default one first."""
    folders = [Path(folder) / recipe / "presets" for folder in lockstep.recipes.__path__]
    found = [Preset(recipe, path.stem, path) for folder in folders for path in folder.glob("*.yaml")]
    return sorted(found, key=lambda preset: (preset.name != recipe, preset.name))


def find(name: str) -> RecipeSpec:
    """Find what a person names.

    Args:
        name: A recipe ("mnist"), one of its presets ("mnist/tutorial", or "tutorial" where no other recipe has one of
            that name), a YAML file with `recipe:` in it, or a Python file with `build(config) -> Parts` in it and,
            where it has settings of its own, `Config` and `PRESET` (a dict). A Python file named here runs; one that a
            YAML file names runs only if it is in the user's list of trusted recipes.

    Raises:
        ConfigError: There is no such recipe, preset or file, or it can't be used.
    """
    path = expanded(name)
    if path.suffix == ".py":
        found = _from_file(path)
    else:
        found = _from_yaml(path) if path.suffix in (".yaml", ".yml") else _from_package(name)
    first, *others = found.layers
    return replace(found, layers=(replace(first, source=name), *others))


def command_arguments(found: RecipeSpec, diff: Mapping[str, Any]) -> list[str]:
    """Arguments of `lockstep train` that give the same settings without reading the user's YAML file again.

    Args:
        found: The recipe.
        diff: The settings that differ from its preset, as nested plain values.
    """
    source = found.recipe if found.preset_name is None else f"{found.recipe}/{found.preset_name}"
    keys = {setting.path for setting in describe.settings(found.config_class)}
    return [
        source,
        *(f"{'.'.join(path)}={json.dumps(value, ensure_ascii=False)}" for path, value in leaves(diff, keys)),
    ]


def _from_package(name: str) -> RecipeSpec:
    known = recipes()
    recipe, slash, preset_name = name.partition("/")
    everything = [preset for each in known for preset in presets(each)]
    if slash:
        found = [preset for preset in everything if (preset.recipe, preset.name) == (recipe, preset_name)]
    elif name in known:
        found = [preset for preset in everything if preset.recipe == preset.name == name]
        if not found:
            return _package_source(name, None)
    else:
        found = [preset for preset in everything if preset.name == name]
    if not found:
        raise _unknown(name, known, everything)
    if len(found) > 1:
        names = " or ".join(f"{preset.recipe}/{preset.name}" for preset in found)
        raise ConfigError(f"several recipes have a preset called {name}", fix=f"say which: {names}")
    return _package_source(found[0].recipe, found[0])


def _package_source(recipe: str, preset: Preset | None) -> RecipeSpec:
    module = importlib.import_module(f"lockstep.recipes.{recipe}.config")
    layers = [_recipe_layer(recipe)]
    if preset is not None:
        layers.append(_without_recipe(read_layer(preset.path, is_preset=True)))
    name = recipe if preset is None else preset.name
    return RecipeSpec(name, recipe, None if preset is None else preset.name, tuple(layers), module.Config)


def _from_yaml(path: Path) -> RecipeSpec:
    check_file(path)
    layer = read_layer(path)
    named = layer.values.get("recipe")
    where = layer.origins.get(("recipe",), short_path(path))
    name = _name_of_yaml(path)
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"{short_path(path)} does not name a recipe",
            given=None if named is None else f"{where}: recipe: {named}",
            fix=f"add a line such as   recipe: {recipes()[0]}",
        )
    if named.endswith((".yaml", ".yml")):
        raise ConfigError("recipe can't be another YAML file", given=f"{where}: recipe: {named}")
    try:
        # A recipe file is looked for beside the YAML, so that the two can be moved together.
        base = (
            _from_file(path.parent / expanded(named), named_in=where) if named.endswith(".py") else _from_package(named)
        )
    except ConfigError as error:
        raise ConfigError(error.what, **{"given": where, **error.slots}) from error
    if _is_run_config(path):
        layer = replace(layer, values=with_present_names(base.config_class, layer.values))
    return replace(base, name=name, layers=(*base.layers, _without_recipe(layer)))


def _is_run_config(path: Path) -> bool:
    """Whether a YAML file is the `config.yaml` that a run has written, perhaps one of an earlier version."""
    beside = ("checkpoints", "weights.safetensors", "environment.json")
    return path.name == "config.yaml" and any((path.parent / name).exists() for name in beside)


def _name_of_yaml(path: Path) -> str:
    """A run folder's settings are called like the run."""
    return re.sub(r"-\d+$", "", path.parent.resolve().name) if path.name == "config.yaml" else path.stem


def _from_file(path: Path, *, named_in: str | None = None) -> RecipeSpec:
    """A recipe file as a source.

    Args:
        path: The file.
        named_in: FILE:LINE that names it, where the command line does not. It then has to be trusted.
    """
    check_file(path)
    path = path.resolve()
    content = read_recipe(path)
    if named_in is not None:
        check_trusted(path, content, named_in)
    module = load_file(path, content)
    shown = short_path(path)
    config_class = getattr(module, "Config", RunConfig)
    if not (isinstance(config_class, type) and issubclass(config_class, RunConfig)):
        raise ConfigError(
            f"Config in {shown} is not a kind of RunConfig",
            fix="from lockstep.config.schema import RunConfig; class Config(RunConfig): ...",
        )
    if not callable(getattr(module, "build", None)):
        raise ConfigError(f"{shown} is no recipe: it has no build", fix="def build(config): return Parts(...)")
    layers = [_recipe_layer(str(path))]
    preset = getattr(module, "PRESET", None)
    if preset is not None:
        if not isinstance(preset, dict):
            raise ConfigError(f"PRESET in {shown} is not a dict")
        layers.append(_without_recipe(mapping_layer(preset, f"{shown}, in PRESET", is_preset=True)))
    name = path.parent.name if path.stem == "recipe" else path.stem
    return RecipeSpec(name, str(path), None, tuple(layers), config_class)


def _recipe_layer(recipe: str) -> Layer:
    return mapping_layer({"recipe": recipe}, "the recipe's name", is_preset=True)


def _without_recipe(layer: Layer) -> Layer:
    values: dict[str, Any] = {key: value for key, value in layer.values.items() if key != "recipe"}
    return replace(layer, values=values)


def _unknown(name: str, known: Iterable[str], everything: Iterable[Preset]) -> ConfigError:
    full = [f"{preset.recipe}/{preset.name}" for preset in everything]
    names: dict[str, str] = {**{preset.name: preset.name for preset in everything}, **{each: each for each in known}}
    near = difflib.get_close_matches(name, [*names, *full], n=1)
    path, do = expanded(name), None
    if (path / "config.yaml").is_file():
        do = f"{name} is a run folder. To go on with it: --run-dir {shlex.quote(name)} --resume auto"
    elif (path / "recipe.py").is_file():
        near = [str(path / "recipe.py")]
    return ConfigError(
        f"there is no recipe or preset called {name}",
        nearest=near[0] if near else None,
        recipes=wrapped(", ".join(known)),
        presets=wrapped(", ".join(full)),
        fix=do or "name one of these, a YAML file (.yaml) or a recipe file (.py)",
    )
