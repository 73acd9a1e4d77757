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

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.config.schema import RunConfig
from lockstep.data.keyed import seeded
from lockstep.engine.parts import Parts
from lockstep.errors import CheckpointError, ConfigError
from lockstep.provenance.run_identity import check_facts, is_vouched
from lockstep.storage.run_folder import RunFolder
from lockstep.storage.run_weights import identity_of

FILE_NAME = "facts.json"
DatasetInfo = dict[str, Any]


class Recipe(Protocol):
    """What the engine needs of a recipe."""

    def facts(self, config: RunConfig) -> Mapping[str, Any]:
        """What is to be kept with the run, found in the data: plain JSON. Empty if there is nothing."""

    def build(self, config: RunConfig, facts: Mapping[str, Any]) -> Parts:
        """The recipe's parts."""


def find_dataset_info(recipe: Recipe, config: RunConfig) -> DatasetInfo:
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


def read_dataset_info(folder: Path) -> DatasetInfo | None:
    """What a run keeps; None if it keeps nothing.

    Raises:
        CheckpointError: The file is damaged.
    """
    return RunFolder(folder).read_json(FILE_NAME) if os.path.lexists(folder / FILE_NAME) else None


def write_dataset_info(folder: RunFolder, facts: DatasetInfo) -> None:
    """Write a run's facts into its folder; no file where there are none."""
    if facts:
        folder.write_json(FILE_NAME, facts)
    else:
        (folder.path / FILE_NAME).unlink(missing_ok=True)


def build_from(recipe: Recipe, config: RunConfig, facts: DatasetInfo, run: Path) -> Parts:
    """A recipe's parts from the facts of a run.

    Raises:
        CheckpointError: The recipe can't use the facts, and no checkpoint tells whether they are as they were.
    """
    try:
        return recipe.build(config, facts)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        if not facts or is_vouched(identity_of(run, "last")[1]):
            raise
        raise CheckpointError(
            f"{run / FILE_NAME} does not fit the recipe: {type(error).__name__}: {error}",
            likely="the file or the recipe was changed since the run began",
            do="put it back as it was; LOCKSTEP_DEBUG=1 shows the traceback",
        ) from error


def dataset_info_for(recipe: Recipe, config: RunConfig, world: World, origin: Path | None) -> DatasetInfo:
    """The facts that a run is built with, the same on all ranks; only rank 0 looks for them.

    Args:
        recipe: Is asked where no run has them.
        config: The settings.
        world: The ranks.
        origin: The run folder to go on from; None for a run that begins.

    Raises:
        CheckpointError: The run's facts were altered since it began, or are gone and the data gives others.
    """

    def look() -> DatasetInfo:
        if origin is None:
            return find_dataset_info(recipe, config)
        kept = read_dataset_info(origin)
        facts = find_dataset_info(recipe, config) if kept is None else kept
        check_facts(identity_of(origin, "last")[1], facts, origin)
        return facts

    return collectives.run_on_rank0(world, look)
