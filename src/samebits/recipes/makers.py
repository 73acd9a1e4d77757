"""Recipes that can make synthetic data: `MakeConfig` in their `config.py`, `make(config, out)` in their `make.py`."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.config.sections import Settings
from samebits.errors import ConfigError
from samebits.extras import require_recipe
from samebits.recipes.catalog import list_recipes
from samebits.recipes.listing import nearest_fix


@dataclass(frozen=True)
class Maker:
    """The part of a recipe that makes synthetic data."""

    recipe: str  #: The name of the recipe.
    config_class: type[Settings]  #: Its settings.

    def make(self, config: Any, out: Path) -> str:
        """Write a dataset into an empty folder, and return a summary for the user.

        Raises:
            ConfigError: A package that the recipe needs is not installed.
        """
        require_recipe(self.recipe)
        summary: str = importlib.import_module(f"samebits.recipes.{self.recipe}.make").make(config, out)
        return summary


def list_makers() -> list[Maker]:
    """List the makers of all recipes that have one."""
    found = []
    for recipe in list_recipes():
        module = importlib.import_module(f"samebits.recipes.{recipe}.config")
        if hasattr(module, "MakeConfig"):
            found.append(Maker(recipe, module.MakeConfig))
    return found


def find_maker(name: str) -> Maker:
    """Find the maker of a recipe. The name of a preset counts as that of its recipe.

    Raises:
        ConfigError: There is no such recipe, or it makes no data.
    """
    recipe = name.partition("/")[0]
    by_name = {maker.recipe: maker for maker in list_makers()}
    if recipe in by_name:
        return by_name[recipe]
    what = f"recipe {recipe} makes no data" if recipe in list_recipes() else f"there is no recipe called {recipe}"
    raise ConfigError(what, allowed=", ".join(by_name), fix=nearest_fix(recipe, by_name, f"Use {next(iter(by_name))}."))
