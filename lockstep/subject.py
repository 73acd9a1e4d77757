"""A trained model as a person names it: a run folder, or a file of weights and what it is of."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.load import load
from lockstep.config.schema import RunConfig
from lockstep.errors import CheckpointError, ConfigError
from lockstep.recipes.catalog import Source, find

if TYPE_CHECKING:
    from torch import nn

    from lockstep.cluster.world import World
    from lockstep.engine.parts import Parts

_SHOWN = 5  # runs, in an error


@dataclass(frozen=True)
class Subject:
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
        return self.path / "logs" if self.preset is None else Path(tempfile.gettempdir())

    def settings(self) -> tuple[Source, RunConfig]:
        """The recipe and the settings.

        Raises:
            CheckpointError: There is no such run folder or file.
            ConfigError: What was given does not fit together.
        """
        if self.path.is_file():
            if self.preset is None:
                raise ConfigError(
                    f"{self.path} is a file, and nothing says of which model",
                    do="add --preset NAME: a recipe, a preset or a YAML file; or name a run folder",
                )
            found = find(self.preset)
        elif self.preset is not None and self.path.is_dir():
            raise ConfigError("--preset was given with a run folder, which has its settings in it", do="leave it out")
        elif not self.path.exists():
            raise CheckpointError(f"{self.path} does not exist", runs=", ".join(_runs_near(self.path)))
        elif not (self.path / "config.yaml").is_file():
            raise CheckpointError(f"{self.path} is not a run folder: it has no config.yaml")
        else:
            found = find(str(self.path / "config.yaml"))
        return found, load(found.config_class, found.layers, self.overrides).config

    def open(self, found: Source, config: RunConfig, world: World) -> tuple[Parts, nn.Module]:
        """The parts, and the model with its weights, in evaluation mode, on the world's device."""
        from lockstep.engine.build import build_parts, lay_out
        from lockstep.engine.checkpoint import weights_of
        from lockstep.engine.determinism import configure
        from lockstep.engine.facts import facts_for
        from lockstep.engine.pretrained import load_whole
        from lockstep.engine.weights import load_into

        configure(config, world.device)
        facts = facts_for(found, config, world, self.path if self.preset is None else None)
        parts = build_parts(config, lambda: found.build(config, facts))
        if self.preset is not None:
            load_whole(parts.model, self.path)
        else:
            path, state = weights_of(self.path, self.checkpoint)
            load_into(parts.model, state, path)
        return parts, lay_out(parts.model, config, world.device).eval()


def _runs_near(path: Path) -> list[str]:
    """The newest runs where a run was looked for, or else in runs/."""
    for parent in (path.parent, Path("runs")):
        found = sorted(parent.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
        if found:
            return [str(file.parent) for file in found[-_SHOWN:]]
    return []
