"""Recipes that can make data up: `MakeConfig` in their `config.py`, `make(config, out)` in their `make.py`."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.schema import Settings
from lockstep.errors import ConfigError
from lockstep.recipes.catalog import list_recipes


@dataclass(frozen=True)
class Maker:
    """How a recipe makes data.

    Attributes:
        recipe: The recipe's name.
        config_class: What can be chosen.
    """

    recipe: str
    config_class: type[Settings]

    def make(self, config: Any, out: Path) -> str:
        """Write a dataset into an empty folder; what there is to say of it. Imports what that takes."""
        said: str = importlib.import_module(f"lockstep.recipes.{self.recipe}.make").make(config, out)
        return said


def list_makers() -> list[Maker]:
    """All recipes that can."""
    found = []
    for recipe in list_recipes():
        module = importlib.import_module(f"lockstep.recipes.{recipe}.config")
        if hasattr(module, "MakeConfig"):
            found.append(Maker(recipe, module.MakeConfig))
    return found


def find_maker(name: str) -> Maker:
    """The maker of a recipe; a preset's name counts as its recipe's.

    Raises:
        ConfigError: There is no such recipe, or it makes no data.
    """
    recipe = name.partition("/")[0]
    by_name = {maker.recipe: maker for maker in list_makers()}
    if recipe in by_name:
        return by_name[recipe]
    near = difflib.get_close_matches(recipe, by_name, n=1)
    what = f"recipe {recipe} makes no data" if recipe in list_recipes() else f"there is no recipe called {recipe}"
    raise ConfigError(what, nearest=near[0] if near else None, allowed=", ".join(by_name))
