"""Recipes that can make synthetic data: `MakeConfig` in their `config.py`, `make(config, out)` in their `make.py`."""

import importlib
from pathlib import Path

from samebits.config.sections import Settings
from samebits.errors import ConfigError
from samebits.extras import require_recipe
from samebits.recipes.catalog import list_recipes
from samebits.recipes.listing import nearest_fix


def list_makers() -> dict[str, type[Settings]]:
    """Return the recipes that can make synthetic data, each with the class of the settings for it."""
    configs = {recipe: importlib.import_module(f"samebits.recipes.{recipe}.config") for recipe in list_recipes()}
    return {recipe: module.MakeConfig for recipe, module in configs.items() if hasattr(module, "MakeConfig")}


def find_maker(name: str) -> tuple[str, type[Settings]]:
    """Find a recipe that makes data, and its settings. The name of a preset counts as that of its recipe.

    Raises:
        ConfigError: There is no such recipe, or it makes no data.
    """
    recipe, makers = name.partition("/")[0], list_makers()
    if recipe in makers:
        return recipe, makers[recipe]
    what = f"recipe {recipe} makes no data" if recipe in list_recipes() else f"there is no recipe called {recipe}"
    raise ConfigError(what, allowed=", ".join(makers), fix=nearest_fix(recipe, makers, f"Use {next(iter(makers))}."))


def make_data(recipe: str, config: Settings, out: Path) -> str:
    """Write a dataset into an empty folder, and return a summary for the user.

    Raises:
        ConfigError: A package that the recipe needs is not installed.
    """
    require_recipe(recipe)
    summary: str = importlib.import_module(f"samebits.recipes.{recipe}.make").make(config, out)
    return summary
