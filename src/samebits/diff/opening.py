"""A run as a job of one process, from its run folder, for replays that write nothing."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from samebits.bench.bench import joined
from samebits.cluster.env import ALONE
from samebits.config.load import load, mapping_layer
from samebits.config.schema import RunConfig
from samebits.diff.folders import Recorded
from samebits.engine.assemble import make_job
from samebits.engine.dataset_info import build_from
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.inference.trained_model import TrainedModel
from samebits.launch.kernels import pin_kernels
from samebits.provenance.run_identity import SETTINGS, identity
from samebits.provenance.same_run import check_replay, settings_of
from samebits.recipes.catalog import RecipeSpec, find
from samebits.storage.run_folder import RunFolder
from samebits.storage.run_weights import identity_of

# Requests are then read one by one, at any step.
_IN_PROCESS = ("loader.num_workers=0",)


def open_job(
    recorded: Recorded, overrides: Sequence[str], recipe: Path | None, stack: ExitStack
) -> tuple[Job, Callable[[], Parts]]:
    """Open a run, with a fresh model.

    Args:
        recorded, overrides: What the run folder states, and settings that do not change the result.
        recipe: The recipe file to replay with; None: the recipe that `config.yaml` names, if the user trusts it.

    Returns:
        The job, and a function that builds the recipe's parts again.

    Raises:
        ConfigError: The run is not exact, an override would change its result, or this process has other kernels.
        SamebitsError: Recipe, data or settings are missing or were altered.
    """
    folder = recorded.path.absolute()
    model = TrainedModel(folder, (*overrides, *_IN_PROCESS))
    spec, config = model.settings() if recipe is None else _settings_with(model, recipe)
    check_replay(recorded.path, config, "locate differences within a step", is_other_recipe=True)
    pin_kernels(config.kernels)  # raises an error if the other run has others: they are those of the process
    world = stack.enter_context(joined(config, ALONE))
    info = model.dataset_info(spec, config, world)
    # The recipe file may have moved, or be another one: checkpoints have the name that the run gave it.
    kept = identity_of(folder, "last")[1].get(SETTINGS)
    if isinstance(kept, dict) and isinstance(kept.get("recipe"), str):
        config = config.model_copy(update={"recipe": kept["recipe"]})
    # As at a restart: the check that a recipe is repeatable is not what the user asks for here.
    job = make_job(config, lambda: build_from(spec, config, info, folder), world, is_restart=True)
    job.identity = identity(config, info)
    return job, lambda: spec.build(config, info)


def _settings_with(model: TrainedModel, recipe: Path) -> tuple[RecipeSpec, RunConfig]:
    """Return a run's settings with another recipe file, which the user named and therefore trusts."""
    base = find(str(recipe))
    values = settings_of(RunFolder(model.path))
    values.pop("recipe", None)
    layers = (*base.layers, mapping_layer(values, str(model.path / "config.yaml")))
    return replace(base, layers=layers), load(base.config_class, layers, model.overrides).config
