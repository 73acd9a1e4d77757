"""Dataset info: values that a recipe reads from its data once and stores with the run, such as class names.

A recipe returns it from `dataset_info(config)`, which is called on rank 0 when a run starts, and receives it in
`build(config, dataset_info)`. Later commands read `dataset_info.json` from the run folder and need no data.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.seeding import seeded
from samebits.engine.parts import Parts
from samebits.errors import CheckpointError, ConfigError, is_out_of_memory
from samebits.provenance.run_identity import DATASET_INFO, check_dataset_info
from samebits.storage.run_folder import RunFolder
from samebits.storage.run_weights import identity_of

FILE_NAME = "dataset_info.json"
DatasetInfo = dict[str, Any]


class Recipe(Protocol):
    """A recipe, as the engine uses it."""

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
    """Read the dataset info of a run; None if the run stores none. Raises CheckpointError if the file is damaged."""
    # lexists: a dangling link is a damaged run folder and raises an error, instead of counting as "stores none".
    return RunFolder(folder).read_json(FILE_NAME) if os.path.lexists(folder / FILE_NAME) else None


def build_from(recipe: Recipe, config: RunConfig, dataset_info: DatasetInfo, run: Path) -> Parts:
    """Build a recipe's parts from the dataset info of a run.

    If the recipe is a file and a checkpoint proves that the dataset info is the run's own, an error is a bug in the
    recipe and raised as it is.

    Raises:
        CheckpointError: The dataset info does not fit the recipe.
    """
    try:
        return recipe.build(config, dataset_info)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        is_own = config.recipe.endswith(".py") and identity_of(run, "last")[1].get(DATASET_INFO) is not None
        if is_own or is_out_of_memory(error) or not os.path.lexists(run / FILE_NAME):
            raise
        raise CheckpointError(
            f"{run / FILE_NAME} does not fit the recipe: {type(error).__name__}: {error}",
            cause="The file or the recipe was changed since the run started.",
            fix="Restore both; SAMEBITS_DEBUG=1 shows the traceback.",
        ) from error


def dataset_info_for(recipe: Recipe, config: RunConfig, world: World, origin: Path | None) -> DatasetInfo:
    """Return the dataset info to build a run with, equal on all ranks; rank 0 reads it, from `origin` at a resume.

    Raises:
        CheckpointError: The run's dataset info was altered since it started, or is missing and the data has other info.
    """

    def look() -> DatasetInfo:
        if origin is None:
            return find_dataset_info(recipe, config)
        kept = read_dataset_info(origin)
        dataset_info = find_dataset_info(recipe, config) if kept is None else kept
        check_dataset_info(identity_of(origin, "last")[1], dataset_info, origin)
        return dataset_info

    # Through rank 0, so that an error is raised on every rank, with one text (ADR 12).
    return collectives.run_on_rank0(world, look)
