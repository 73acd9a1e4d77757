"""What a recipe learns from its data once and keeps with the run: names of classes, an alphabet, a split.

A recipe has a function `facts(config)` for it beside `build(config, facts)`. It is asked on rank 0 when a run begins.
From then on `facts.json` in the run folder speaks, so eval, predict and resume need no data to know them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.cluster import collect
from lockstep.cluster.world import World
from lockstep.config.schema import RunConfig
from lockstep.data.keyed import seeded
from lockstep.engine.parts import Parts
from lockstep.engine.run_folder import RunFolder
from lockstep.engine.run_identity import check_facts, is_vouched
from lockstep.engine.run_weights import identity_of
from lockstep.errors import CheckpointError, ConfigError, is_out_of_memory

FILE_NAME = "facts.json"
Facts = dict[str, Any]


class Recipe(Protocol):
    """What the engine needs of a recipe."""

    def facts(self, config: RunConfig) -> Mapping[str, Any]:
        """What is to be kept with the run, found in the data: plain JSON. Empty if there is nothing."""

    def build(self, config: RunConfig, facts: Mapping[str, Any]) -> Parts:
        """The recipe's parts."""


def find_facts(recipe: Recipe, config: RunConfig) -> Facts:
    """Let a recipe look into its data, with all generators seeded by the run's seed.

    Raises:
        ConfigError: What it gives is not plain JSON.
        DataError: The recipe's own, about its data.
    """
    with seeded(config.seed):
        found = recipe.facts(config)
    try:
        # To JSON and back: what a fresh run sees (a tuple, a number as a key) is then what a resumed one will see.
        facts = json.loads(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise ConfigError("the recipe's facts can't be written as JSON", problem=error) from None
    if not isinstance(facts, dict):
        raise ConfigError(f"the recipe's facts are a {type(found).__name__}, not a dict", do="return {name: value}")
    return facts


def read_facts(folder: Path) -> Facts | None:
    """What a run keeps; None if it keeps nothing.

    Raises:
        CheckpointError: The file is damaged.
    """
    return RunFolder(folder).read_json(FILE_NAME) if os.path.lexists(folder / FILE_NAME) else None


def keep_facts(folder: RunFolder, facts: Facts) -> None:
    """Write a run's facts into its folder; no file where there are none."""
    if facts:
        folder.write_json(FILE_NAME, facts)
    else:
        (folder.path / FILE_NAME).unlink(missing_ok=True)


def build_from(recipe: Recipe, config: RunConfig, facts: Facts, run: Path) -> Parts:
    """A recipe's parts from the facts of a run.

    Where the recipe is a file and a checkpoint proves that the facts are those of the run, the error is the recipe's
    own and is raised as it is.

    Raises:
        CheckpointError: The recipe can't use the facts, or can't any more.
    """
    try:
        return recipe.build(config, facts)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        is_own = config.recipe.endswith(".py") and is_vouched(identity_of(run, "last")[1])
        if is_own or is_out_of_memory(error) or not os.path.lexists(run / FILE_NAME):
            raise
        raise CheckpointError(
            f"{run / FILE_NAME} does not fit the recipe: {type(error).__name__}: {error}",
            likely="the file or the recipe was changed since the run began",
            do="put it back as it was; LOCKSTEP_DEBUG=1 shows the traceback",
        ) from error


def facts_for(recipe: Recipe, config: RunConfig, world: World, origin: Path | None) -> Facts:
    """The facts that a run is built with, the same on all ranks; only rank 0 looks for them.

    Args:
        recipe: Is asked where no run has them.
        config: The settings.
        world: The ranks.
        origin: The run folder to go on from; None for a run that begins.

    Raises:
        CheckpointError: The run's facts were altered since it began, or are gone and the data gives others.
    """

    def look() -> Facts:
        if origin is None:
            return find_facts(recipe, config)
        kept = read_facts(origin)
        facts = find_facts(recipe, config) if kept is None else kept
        check_facts(identity_of(origin, "last")[1], facts, origin)
        return facts

    return collect.from_main(world, look)
