"""What a recipe reads from its dataset once and stores with the run: class names, an alphabet, a split.

A recipe returns it from `dataset_info(config)`, which is called on rank 0 when a run starts, and receives it in
`build(config, dataset_info)`. Later commands read `dataset_info.json` from the run folder and need no data.
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
from lockstep.errors import CheckpointError, ConfigError, is_out_of_memory
from lockstep.provenance.run_identity import check_dataset_info, is_vouched
from lockstep.storage.run_folder import RunFolder
from lockstep.storage.run_weights import identity_of

FILE_NAME = "dataset_info.json"
_FORMER_NAME = "facts.json"  # up to version 0.1.0
DatasetInfo = dict[str, Any]


class Recipe(Protocol):
    """What the engine needs of a recipe."""

    def dataset_info(self, config: RunConfig) -> Mapping[str, Any]:
        """Return what the run stores about the dataset, as plain JSON; an empty dict if there is nothing to store."""

    def build(self, config: RunConfig, dataset_info: Mapping[str, Any]) -> Parts:
        """Build the recipe's parts."""


def find_dataset_info(recipe: Recipe, config: RunConfig) -> DatasetInfo:
    """Call the recipe's `dataset_info` with all generators seeded by the run's seed.

    Raises:
        ConfigError: The result is not plain JSON.
        DataError: Raised by the recipe about its data.
    """
    with seeded(config.seed):
        found = recipe.dataset_info(config)
    try:
        # To JSON and back: a fresh run then sees the same types (no tuples, no numbers as keys) as a resumed one.
        dataset_info = json.loads(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the result of the recipe's dataset_info can't be written as JSON",
            cause=error,
            fix="Return a dict of plain values, lists and dicts.",
        ) from None
    if not isinstance(dataset_info, dict):
        raise ConfigError(
            f"the recipe's dataset_info returned a {type(found).__name__}, not a dict", fix="Return {name: value}."
        )
    return dataset_info


def read_dataset_info(folder: Path) -> DatasetInfo | None:
    """Read the dataset info of a run; None if the run stores none.

    Raises:
        CheckpointError: The file is damaged.
    """
    name = next((name for name in (FILE_NAME, _FORMER_NAME) if os.path.lexists(folder / name)), None)
    return None if name is None else RunFolder(folder).read_json(name)


def write_dataset_info(folder: RunFolder, dataset_info: DatasetInfo) -> None:
    """Write the dataset info into the run folder; no file if it is empty."""
    if dataset_info:
        folder.write_json(FILE_NAME, dataset_info)
    else:
        (folder.path / FILE_NAME).unlink(missing_ok=True)


def build_from(recipe: Recipe, config: RunConfig, dataset_info: DatasetInfo, run: Path) -> Parts:
    """A recipe's parts from the dataset_info of a run.

    If the recipe is a file and a checkpoint proves the dataset info to be that of the run, the error is the recipe's
    own and is raised as it is.

    Raises:
        CheckpointError: The recipe can't use the dataset_info, or can't any more.
    """
    try:
        return recipe.build(config, dataset_info)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        is_own = config.recipe.endswith(".py") and is_vouched(identity_of(run, "last")[1])
        if is_own or is_out_of_memory(error) or not os.path.lexists(run / FILE_NAME):
            raise
        raise CheckpointError(
            f"{run / FILE_NAME} does not fit the recipe: {type(error).__name__}: {error}",
            cause="the file or the recipe was changed since the run began",
            fix="put it back as it was; LOCKSTEP_DEBUG=1 shows the traceback",
        ) from error


def dataset_info_for(recipe: Recipe, config: RunConfig, world: World, origin: Path | None) -> DatasetInfo:
    """The dataset_info that a run is built with, the same on all ranks; only rank 0 looks for them.

    Args:
        recipe: Is asked where no run has them.
        config: The settings.
        world: The ranks.
        origin: The run folder to go on from; None for a run that begins.

    Raises:
        CheckpointError: The run's dataset_info were altered since it began, or are gone and the data gives others.
    """

    def look() -> DatasetInfo:
        if origin is None:
            return find_dataset_info(recipe, config)
        kept = read_dataset_info(origin)
        dataset_info = find_dataset_info(recipe, config) if kept is None else kept
        check_dataset_info(identity_of(origin, "last")[1], dataset_info, origin)
        return dataset_info

    return collectives.run_on_rank0(world, look)
