"""Find a recipe and its settings by the name of a recipe, a preset, a YAML file or a Python file.

A recipe is a folder beside this file with `config.py` (class `Config`, no torch), `recipe.py` (`build(config)` returns
its `Parts`; if it also defines `dataset_info(config)`, `build(config, dataset_info)`) and `presets/*.yaml`. The default
preset has the recipe's name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import samebits.recipes
from samebits.config import describe
from samebits.config.document import Layer, mapping_layer, read_layer
from samebits.config.load import Loaded, load
from samebits.config.schema import RunConfig, Settings
from samebits.errors import ConfigError, cannot_read, wrapped
from samebits.extras import extra_with, pip_line, require_recipe
from samebits.host_memory import without_collections
from samebits.plain_file import open_plain, short_path
from samebits.recipes.listing import nearest_fix
from samebits.recipes.trust import check_trusted, read_recipe

if TYPE_CHECKING:
    from samebits.engine.parts import Parts


# Check files with settings and recipes, and import recipe files.


def check_file(path: Path) -> None:
    """Check that a path is a regular file. Its size is checked when it is read."""
    try:
        open_plain(path).close()
    except (FileNotFoundError, NotADirectoryError):
        beside = [file.name for file in path.parent.glob(f"*{path.suffix}")]
        near = difflib.get_close_matches(path.name, beside, n=1)
        raise ConfigError(
            f"there is no file {short_path(path)}",
            cause=None
            if path.parent.is_dir()
            else f"there is no folder {short_path(path.parent)} either",
            fix=f"Use {path.parent / near[0]}." if near else "Check the path.",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise cannot_read(
            ConfigError, ascii(short_path(path)), error, "Use another file."
        ) from None


def expand_user(text: str) -> Path:
    """Replace ~ by the home folder of the user. Raises ConfigError if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{text!r} can't be found: there is no such user", fix="Write the full path."
        ) from None


def import_recipe(path: Path, named_in: str | None) -> tuple[Path, ModuleType]:
    """Check a recipe file, and import the bytes that were checked. One that FILE:LINE `named_in` names must be trusted.

    Raises:
        ConfigError: There is no such file, it is not trusted, or it raises an exception.
    """
    check_file(path)
    path = path.resolve()
    content = read_recipe(path)
    if b".backward(" in content and b"build" not in content:
        raise ConfigError(  # before it trains, or fails without a launcher
            f"{short_path(path)} is a training script, not a recipe, which defines build",
            fix="Start it as it is, with batches of your choice:\n"
            f"  samebits launch --nproc-per-node 2 --global-batch 32 --micro-batch 16 {shlex.quote(short_path(path))}",
        )
    if named_in is not None:
        check_trusted(path, content, named_in)
    return path, load_file(path, content)


def load_file(path: Path, content: bytes | None) -> ModuleType:
    """Import a recipe file once, with its folder in sys.path, so that it can import the modules next to it.

    Args:
        content: Its bytes, which were checked. They are executed: neither the file as it may be a moment later, nor
            a `.pyc` file next to it. None: read the file, if it was not imported before.

    Raises:
        ConfigError: The file raises an exception or calls sys.exit.
    """
    name = path.stem
    taken = sys.modules.get(name)
    if taken is not None and getattr(taken, "__file__", None) == str(path):
        return taken
    if taken is not None or name in sys.stdlib_module_names:
        # Another module has this name, such as a recipe file of another folder.
        name = f"{name}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
    content = read_recipe(path) if content is None else content
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = (
        module  # before it is executed: dataclasses and pickle look classes up by this name
    )
    try:
        with without_collections():  # they take a fifth of the time of importing torch
            # dont_inherit: this file's `from __future__` imports would otherwise apply to the recipe.
            exec(compile(content, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:  # a script may end with sys.exit()
        # A later import would otherwise take the unfinished module.
        sys.modules.pop(name, None)
        extra = (
            extra_with((error.name or "").partition(".")[0])
            if isinstance(error, ModuleNotFoundError)
            else None
        )
        frames = traceback.extract_tb(error.__traceback__)
        places = [(path, frame.lineno) for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename:
            places = [(Path(error.filename), error.lineno)]
        raise ConfigError(
            f"{short_path(path)} can't be imported: {type(error).__name__}",
            where=f"{short_path(places[-1][0])}:{places[-1][1]}" if places else None,
            cause=error.msg if isinstance(error, SyntaxError) else error,
            fix=f"Run {pip_line(extra)}."
            if extra
            else "Correct the file. Set SAMEBITS_DEBUG=1 to see the traceback.",
        ) from error
    return module


@dataclass(frozen=True)
class RecipeSpec:
    """A recipe, and the layers of settings of a run."""

    name: str  #: A short name for the console and for run folders: "digits", or "my" for my.yaml.
    #: The name of a recipe or the absolute path of a recipe file. Stored in the config, so that the config of a run
    #: folder is enough to find the recipe again.
    recipe: str
    #: The preset below the user's settings. None: the defaults of the recipe.
    preset_name: str | None
    layers: tuple[Layer, ...]  #: The settings, for `config.load`.
    config_class: type[RunConfig]  #: The `Config` of the recipe.

    def load(self, overrides: Sequence[str] = ()) -> Loaded[RunConfig]:
        """Resolve the settings: the layers, then the overrides.

        Args:
            overrides: `section.key=value`, with the value as YAML.

        Raises:
            ConfigError: A key is unknown, a setting is missing, or a value is not allowed.
        """
        return load(self.config_class, self.layers, overrides)

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        """Read from the dataset what the run stores, as plain JSON: classes, alphabet, split; empty if there is
        nothing.
        """
        module = self.load_module()
        info: Mapping[str, Any] = (
            module.dataset_info(config) if hasattr(module, "dataset_info") else {}
        )
        return info

    def build(self, config: RunConfig, dataset_info: Mapping[str, Any]) -> Parts:
        """Build the parts of the recipe. Imports the recipe, and torch with it.

        Args:
            dataset_info: What the run stores.
        """
        module = self.load_module()
        takes_info = hasattr(module, "dataset_info")
        parts: Parts = module.build(config, dataset_info) if takes_info else module.build(config)
        return parts

    def load_module(self) -> ModuleType:
        """Import the recipe, and torch with it.

        Raises:
            ConfigError: The file cannot be imported, or a package is missing.
        """
        if self.recipe.endswith(".py"):
            return load_file(Path(self.recipe), None)
        require_recipe(self.recipe)
        return importlib.import_module(f"samebits.recipes.{self.recipe}.recipe")


@dataclass(frozen=True)
class Preset:
    """A YAML file in the folder of a recipe."""

    recipe: str  #: The name of the recipe.
    name: str  #: The name of the file without .yaml.
    path: Path  #: The file.

    @property
    def meaning(self) -> str:
        """The comment on the first line of the file."""
        first, *_ = self.path.read_text(encoding="utf-8").splitlines() or [""]
        return first.removeprefix("#").strip() if first.startswith("#") else ""


def list_recipes() -> list[str]:
    """List the names of the recipes that come with Samebits."""
    return sorted(
        module.name for module in pkgutil.iter_modules(samebits.recipes.__path__) if module.ispkg
    )


def list_presets(recipe: str) -> list[Preset]:
    """List the presets of a recipe, the default one first."""
    folders = [Path(folder) / recipe / "presets" for folder in samebits.recipes.__path__]
    presets = [
        Preset(recipe, path.stem, path) for folder in folders for path in folder.glob("*.yaml")
    ]
    return sorted(presets, key=lambda preset: (preset.name != recipe, preset.name))


def find(name: str) -> RecipeSpec:
    """Find a recipe and its settings by name.

    Args:
        name: A recipe ("mnist"), one of its presets ("mnist/tutorial", or "tutorial" if only one recipe has a preset
            of that name), a YAML file that contains `recipe:`, or a Python file that defines
            `build(config) -> Parts` and, if it has its own settings, `Config` and `PRESET` (a dict). A Python file
            named here is executed. One that a YAML file names is executed only if it is in the user's list of
            trusted recipes.

    Raises:
        ConfigError: There is no such recipe, preset or file, or it cannot be used.
    """
    path = expand_user(name)
    if path.suffix == ".py":
        spec = _from_file(path)
    else:
        spec = _from_yaml(path) if path.suffix in (".yaml", ".yml") else _from_package(name)
    first, *others = spec.layers
    return replace(spec, layers=(replace(first, source=name), *others))


def command_arguments(spec: RecipeSpec, loaded: Loaded[RunConfig]) -> list[str]:
    """Build arguments of `samebits train` that set what differs from the recipe's preset.

    They have the same effect without reading the user's YAML file again.
    """
    source = spec.recipe if spec.preset_name is None else f"{spec.recipe}/{spec.preset_name}"
    return [
        source,
        *(
            f"{key}={json.dumps(value, ensure_ascii=False)}"
            for key, value in describe.given(type(loaded.config), loaded.diff)
        ),
    ]


def _from_package(name: str) -> RecipeSpec:
    known = list_recipes()
    everything = [preset for each in known for preset in list_presets(each)]
    by_name = {f"{preset.recipe}/{preset.name}": preset for preset in everything}
    full_name = f"{name}/{name}" if name in known else name  # the default preset of a recipe
    found = [full for full, preset in by_name.items() if full_name in (full, preset.name)]
    if not found:
        raise _unknown(name, known, everything)
    if len(found) > 1:
        raise ConfigError(
            f"several recipes have a preset called {name}", fix=f"Use {' or '.join(found)}."
        )
    preset = by_name[found[0]]
    module = importlib.import_module(f"samebits.recipes.{preset.recipe}.config")
    layer = _without_recipe(read_layer(preset.path, is_preset=True))
    layers = (_recipe_layer(preset.recipe), layer)
    return RecipeSpec(preset.name, preset.recipe, preset.name, layers, module.Config)


def _from_yaml(path: Path) -> RecipeSpec:
    check_file(path)
    layer = read_layer(path)
    named = layer.values.get("recipe")
    where = layer.origins.get(("recipe",), "")  # there wherever a recipe is named
    if not isinstance(named, str) or not named:
        raise ConfigError(
            f"{short_path(path)} does not name a recipe",
            given=None if named is None else f"{where}: recipe: {named}",
            fix=f"Add a line such as   recipe: {list_recipes()[0]}",
        )
    if named.endswith((".yaml", ".yml")):
        raise ConfigError(
            f"recipe cannot be the YAML file {named}",
            given=f"{where}: recipe: {named}",
            fix="Set recipe to the name of a recipe or to a Python file.",
        )
    try:
        if named.endswith(".py"):
            # The path of a recipe file is relative to the YAML file, so that the two can be moved together.
            base = _from_file(path.parent / expand_user(named), named_in=where)
        else:
            base = _from_package(named)
    except ConfigError as error:
        raise error.with_slots(where=error.slots.get("where", where)) from error
    # The config.yaml of a run folder has the name of the run, without its number.
    name = (
        re.sub(r"-\d+$", "", path.parent.resolve().name)
        if path.name == "config.yaml"
        else path.stem
    )
    return replace(base, name=name, layers=(*base.layers, _without_recipe(layer)))


def _from_file(path: Path, *, named_in: str | None = None) -> RecipeSpec:
    """Load a recipe file. If only FILE:LINE `named_in` names it, not the command line, it has to be trusted."""
    path, module = import_recipe(path, named_in)
    shown = short_path(path)
    config_class = getattr(module, "Config", RunConfig)
    if not (isinstance(config_class, type) and issubclass(config_class, RunConfig)):
        raise ConfigError(
            f"Config in {shown} is not a subclass of RunConfig",
            fix="Write: from samebits.config.schema import RunConfig; class Config(RunConfig): ...",
        )
    if not callable(getattr(module, "build", None)):
        raise ConfigError(
            f"{shown} is not a recipe: it defines no build",
            fix="Define: def build(config): return Parts(...). A training script is started by samebits launch.",
        )
    layers = [_recipe_layer(str(path))]
    preset = getattr(module, "PRESET", None)
    if preset is not None:
        if not isinstance(preset, dict):
            raise ConfigError(
                f"PRESET in {shown} is a {type(preset).__name__}, not a dict",
                fix='Write: PRESET = {"epochs": 10}',
            )
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
    names = dict.fromkeys([*(preset.name for preset in everything), *known, *full])
    near = difflib.get_close_matches(name, names, n=1)
    path = expand_user(name)
    cause = None
    fix = f"Use {near[0] if near else 'one of these, a YAML file (.yaml) or a recipe file (.py)'}."
    if (path / "config.yaml").is_file():
        cause = f"{name} is a run folder"
        fix = f"Resume it with --run-dir {shlex.quote(name)} --resume auto"
    elif (path / "recipe.py").is_file():
        fix = f"Use {path / 'recipe.py'}."
    elif path.is_dir():
        fix = f"To train on images in it, a subfolder per class: samebits train classify data.root={shlex.quote(name)}"
    return ConfigError(
        f"there is no recipe or preset called {name}",
        allowed=f"recipes: {wrapped(', '.join(known))}\npresets: {wrapped(', '.join(full))}",
        cause=cause,
        fix=fix,
    )


# Recipes that can make synthetic data: `MakeConfig` in their `config.py`, `make(config, out)` in their `make.py`.


def list_makers() -> dict[str, type[Settings]]:
    """Return the recipes that can make synthetic data, each with the class of the settings for it."""
    configs = {
        recipe: importlib.import_module(f"samebits.recipes.{recipe}.config")
        for recipe in list_recipes()
    }
    return {
        recipe: module.MakeConfig
        for recipe, module in configs.items()
        if hasattr(module, "MakeConfig")
    }


def find_maker(name: str) -> tuple[str, type[Settings]]:
    """Find a recipe that makes data, and its settings. The name of a preset counts as that of its recipe.

    Raises:
        ConfigError: There is no such recipe, or it makes no data.
    """
    recipe = name.partition("/")[0]
    makers = list_makers()
    if recipe in makers:
        return recipe, makers[recipe]
    what = (
        f"recipe {recipe} makes no data"
        if recipe in list_recipes()
        else f"there is no recipe called {recipe}"
    )
    raise ConfigError(
        what,
        allowed=", ".join(makers),
        fix=nearest_fix(recipe, makers, f"Use {next(iter(makers))}."),
    )


def make_data(recipe: str, config: Settings, out: Path) -> str:
    """Write a dataset into an empty folder, and return a summary for the user.

    Raises:
        ConfigError: A package that the recipe needs is not installed.
    """
    require_recipe(recipe)
    summary: str = importlib.import_module(f"samebits.recipes.{recipe}.make").make(config, out)
    return summary
