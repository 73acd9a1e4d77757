"""A trained model as a person names it: a run folder, or a file of weights and what it is of."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.recipes.catalog import RecipeSpec, find
from lockstep.report.console import Console

if TYPE_CHECKING:
    from torch import nn

    from lockstep.cluster.world import World
    from lockstep.engine.parts import Parts

_SHOWN = 5  # runs, in an error


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, as a person names it.

    Attributes:
        path: A run folder, or a file of weights from elsewhere.
        overrides: Settings that differ from the run's, or from the preset's.
        checkpoint: Of a run: "last" for the final weights, "best", or a checkpoint's name.
        preset: Of a file: the recipe, preset or YAML file that says which model it is.
    """

    path: Path
    overrides: Sequence[str] = ()
    checkpoint: str = "last"
    preset: str | None = None

    @property
    def log_dir(self) -> Path:
        """Where the stacks go if a rank hangs."""
        logs = self.path / "logs"
        is_elsewhere = self.preset is not None or logs.is_symlink()  # a stranger's link may lead to any folder
        return Path(tempfile.gettempdir()) if is_elsewhere else logs

    def settings(self) -> tuple[RecipeSpec, RunConfig]:
        """The recipe and the settings.

        Raises:
            CheckpointError: There is no such run folder or file.
            ConfigError: What was given does not fit together.
        """
        if os.path.isfile(self.path):  # unlike Path.is_file, never an error
            if self.preset is None:
                raise ConfigError(
                    f"{self.path} is a file, and nothing says of which model",
                    fix="add --preset NAME: a recipe, a preset or a YAML file; or name a run folder",
                )
            found = find(self.preset)
        elif self.preset is not None and os.path.isdir(self.path):
            raise ConfigError("--preset was given with a run folder, which has its settings in it", fix="leave it out")
        elif not os.path.lexists(self.path):
            raise CheckpointError(f"{self.path} does not exist", runs=", ".join(_runs_near(self.path)))
        elif not os.path.lexists(self.path / "config.yaml"):
            raise CheckpointError(f"{self.path} is not a run folder: it has no config.yaml")
        else:
            found = self._find_run()
        return found, load(found.config_class, found.layers, self.overrides).config

    def _find_run(self) -> RecipeSpec:
        from lockstep.storage.recipe_copy import describe_copy

        try:
            return find(str(self.path / "config.yaml"))
        except ConfigError as error:
            raise ConfigError(error.what, **error.slots, run=describe_copy(self.path)) from error

    def open(self, found: RecipeSpec, config: RunConfig, world: World) -> tuple[Parts, nn.Module]:
        """The parts, and the model with its weights, in evaluation mode, on the world's device."""
        from lockstep.engine.build import build_parts, prepare_model
        from lockstep.engine.dataset_info import build_from, dataset_info_for
        from lockstep.module.determinism import use_deterministic_algorithms
        from lockstep.storage.pretrained import load_strict
        from lockstep.storage.run_weights import weights_of
        from lockstep.storage.weights import load_into

        use_deterministic_algorithms(config, world.device)
        if self.preset is not None:
            dataset_info = dataset_info_for(found, config, world, None)
            parts = build_parts(config, lambda: found.build(config, dataset_info))
            load_strict(parts.model, self.path)
        else:
            dataset_info = self._checked_dataset_info(found, config, world)
            parts = build_parts(config, lambda: build_from(found, config, dataset_info, self.path))
            path, state = weights_of(self.path, self.checkpoint, parts.model)
            load_into(parts.model, state, path)
        return parts, prepare_model(parts.model, config, world.device).eval()

    def _checked_dataset_info(self, found: RecipeSpec, config: RunConfig, world: World) -> dict[str, Any]:
        """The run's dataset_info, after a look whether recipe, settings and dataset_info are still those of the run."""
        from lockstep.engine.dataset_info import dataset_info_for
        from lockstep.provenance.run_identity import check_settings
        from lockstep.storage.recipe_copy import recipe_change
        from lockstep.storage.run_weights import identity_of

        if world.is_main and (changed := recipe_change(self.path, config.recipe)):
            Console(sys.stderr).say(changed)
        checkpoint, kept = identity_of(self.path, self.checkpoint)
        check_settings(kept, load(found.config_class, found.layers).config, checkpoint, is_resume=False)
        return dataset_info_for(found, config, world, self.path)


def _runs_near(path: Path) -> list[str]:
    """The newest runs where a run was looked for, or else in runs/."""
    for parent in (path.parent, Path("runs")):
        found = sorted(filter(os.path.isfile, parent.glob("*/config.yaml")), key=os.path.getmtime)
        if found:
            return [str(file.parent) for file in found[-_SHOWN:]]
    return []
