"""A trained model: a run folder, or a file of weights and the name of its model."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from samebits.config.given import flat
from samebits.config.schema import Mark, RunConfig, marks_of
from samebits.errors import CheckpointError, ConfigError, printable
from samebits.provenance.identity import best_finding
from samebits.provenance.run_files import RunFiles
from samebits.recipes.catalog import RecipeSpec, find
from samebits.report.console import Console
from samebits.report.format import metric_name, metric_value
from samebits.storage.run_folder import check_utf8, no_run, runs_in

if TYPE_CHECKING:
    from torch import nn

    from samebits.cluster.world import World
    from samebits.engine.parts import Parts


# Which weights of a run folder `eval`, `predict` and `export` take, in one line for the user.


_MAX_NAME = 40


def describe_weights(run: Path, which: str) -> str:
    """Name the weights that a command takes, and the best ones if they are others.

    The final weights are the default, because theirs is the SHA-256 that a run prints and that `samebits verify`
    confirms. The best ones are chosen by the validation set, so their value there is too high by some chance.

    Returns:
        The line; empty for a file, and if the folder does not have the values. A second one if there is no statement.
    """
    if not run.is_dir():
        return ""
    files = RunFiles(run, is_tolerant=True)
    best = _best(files)
    best_value = _value(best, best.get("value"))
    if which == "best":
        return f"best checkpoint{_at(best.get('step'))}{f': {best_value}' if best_value else ''}"
    if which != "last":
        return f"checkpoint {printable(which)}"
    result = files.result
    if not os.path.lexists(run / "weights.safetensors"):
        return "newest checkpoint, because the run is not complete"
    metrics = result.get("metrics")
    last = _value(best, metrics.get(best.get("metric")) if isinstance(metrics, dict) else None)
    if not last:
        return ""
    is_best = best.get("step") == result.get("steps")
    line = f"final weights{_at(result.get('steps'))}{', the best of the run' * is_best}: {last}"
    if best_value and not is_best:
        line += f"; --checkpoint best{_at(best.get('step'))}: {best_value.rpartition(' ')[2]}"
    if not files.has_statement:
        line += "\nprovenance.json is missing, so nothing states which weights the run had"
    return line


def _best(files: RunFiles) -> Mapping[str, Any]:
    """Return the best validation; none that contradicts the run's statement."""
    # Of a statement that cannot be read, what opens the weights reports it.
    with suppress(CheckpointError):
        if files.has_statement and best_finding(files):
            return {}
    with suppress(CheckpointError):  # values that are none
        return files.best
    return {}


def _at(step: object) -> str:
    return f" (step {step:,})" if isinstance(step, int) and 0 <= step < 1 << 63 else ""


def _value(best: Mapping[str, Any], value: object) -> str:
    """Format a value of the run's metric; empty if the folder, which may be a stranger's, has none."""
    name = best.get("metric")
    if not (
        isinstance(name, str)
        and len(name) <= _MAX_NAME
        and isinstance(value, int | float)
        and abs(value) < 1e300
    ):
        return ""
    return f"{printable(metric_name(name))} {metric_value(name, value)}"


_PATHS = ("data.root", "data.cache")  # text in the recipes of some users


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, as the user names it."""

    path: Path  #: A run folder, or a file of weights from elsewhere.
    overrides: Sequence[str] = ()  #: Settings that differ from those of the run or the preset.
    checkpoint: str = (
        "last"  #: For a run folder: "last" for the final weights, "best", or a checkpoint's name.
    )
    preset: str | None = None  #: For a file: the recipe, preset or YAML file of its model.

    @property
    def log_dir(self) -> Path:
        """Folder for stack dumps if a rank hangs."""
        logs = self.path / "logs"
        # a link in a stranger's folder may lead anywhere
        is_elsewhere = self.preset is not None or logs.is_symlink()
        return Path(tempfile.gettempdir()) if is_elsewhere else logs

    def settings(self) -> tuple[RecipeSpec, RunConfig]:
        """Return the recipe and the resolved settings.

        Raises:
            CheckpointError: The run folder or file does not exist.
            ConfigError: `preset` is missing or not allowed, or a setting is wrong.
        """
        self.check_path()
        found = self._find_run() if self.preset is None else find(self.preset)
        config = found.load(self.overrides).config
        if self.preset is None:
            check_data_is_elsewhere(self.path, config, self.overrides)
        return found, config

    def check_unused(self) -> None:
        """Check that no setting was given that only training reads."""
        for override in self.overrides:
            name = override.partition("=")[0].strip()
            if Mark.TRAINING in marks_of(name):
                raise ConfigError(
                    f"{name} has no effect on a trained model",
                    given=override,
                    fix="Remove it. To train with it: samebits train.",
                )

    def check_path(self) -> None:
        """Check that the path is a run folder, or a file with a preset, without reading it.

        Raises:
            CheckpointError: The path does not exist, or is no run folder.
            ConfigError: `preset` is missing or not allowed.
        """
        if os.path.isfile(self.path):  # unlike Path.is_file, never an error
            if self.preset is None:
                raise ConfigError(
                    f"{self.path} is a file, and its model is not known",
                    fix="Add --preset NAME: the recipe, preset or YAML file of its model. Or name a run folder.",
                )
        elif self.preset is not None and os.path.isdir(self.path):
            raise ConfigError(
                f"--preset {self.preset} was given with a run folder, which contains its settings",
                given=str(self.path),
                fix="Remove --preset.",
            )
        elif not os.path.lexists(self.path / "config.yaml"):
            error = no_run(self.path)
            if os.path.isdir(self.path) and not runs_in(self.path):
                hint = f"To evaluate a run on the data in it: samebits eval RUN data.root={shlex.quote(str(self.path))}"
                raise error.with_slots(fix=f"{error.slots['fix']}\n{hint}")
            raise error
        else:
            check_utf8(self.path)

    def _find_run(self) -> RecipeSpec:
        from samebits.storage.run_folder import describe_copy

        try:
            return find(str(self.path / "config.yaml"))
        except ConfigError as error:
            cause = "\n".join(filter(None, [error.slots.get("cause"), describe_copy(self.path)]))
            raise error.with_slots(cause=cause) from error

    def open(self, found: RecipeSpec, config: RunConfig, world: World) -> tuple[Parts, nn.Module]:
        """Build the recipe's parts and the model with its weights, in evaluation mode.

        Args:
            world: The ranks; the model is placed on this rank's device.

        Raises:
            SamebitsError: The weights, settings or dataset info do not fit, or were altered.
        """
        from samebits.engine.build import build_from, build_parts, dataset_info_for, prepare_model
        from samebits.module.determinism import use_deterministic_algorithms
        from samebits.provenance.identity import check_stated
        from samebits.storage.pretrained import load_strict
        from samebits.storage.weights import load_into, weights_of

        use_deterministic_algorithms(config, world.device)
        if self.preset is not None:
            dataset_info = dataset_info_for(found, config, world, None)
            parts = build_parts(config, lambda: found.build(config, dataset_info))
            load_strict(parts.model, self.path)
        else:
            dataset_info = self.dataset_info(found, config, world)
            parts = build_parts(config, lambda: build_from(found, config, dataset_info, self.path))
            path, state = weights_of(self.path, self.checkpoint, parts.model)
            check_stated(self.path, path, self.checkpoint)
            load_into(parts.model, state, path)
        return parts, prepare_model(parts.model, config, world.device).eval()

    def dataset_info(self, found: RecipeSpec, config: RunConfig, world: World) -> dict[str, Any]:
        """Return the run's dataset info, after comparing recipe, settings and dataset info with its checkpoint.

        Raises:
            SamebitsError: Settings or dataset info were altered.
        """
        from samebits.engine.build import dataset_info_for
        from samebits.storage.run_folder import recipe_change

        if world.is_main and (changed := recipe_change(self.path, config.recipe)):
            Console(sys.stderr).say(changed)
        self.check_settings(found)
        return dataset_info_for(found, config, world, self.path)

    def check_settings(self, found: RecipeSpec) -> None:
        """Compare the run's settings with those in its checkpoint.

        Raises:
            ConfigError: A setting that determines the result was altered.
        """
        from samebits.provenance.identity import check_settings
        from samebits.storage.weights import identity_of

        checkpoint, kept = identity_of(self.path, self.checkpoint)
        check_settings(kept, found.load().config, checkpoint, is_resume=False)


def data_places(config: RunConfig) -> dict[str, Path]:
    """Return the files and folders of data and initial weights, absolute, by the name of their setting."""
    sections = {name: getattr(config, name, None) for name in ("data", "model")}
    plain = flat(
        {name: each.model_dump() for name, each in sections.items() if isinstance(each, BaseModel)}
    )
    return {
        name: Path(os.path.abspath(Path(value).expanduser()))
        for name, value in plain.items()
        if isinstance(value, Path) or (name in _PATHS and isinstance(value, str))
    }


def describe_places(config: RunConfig) -> str:
    """Return where data and initial weights are, in one line; empty for those without a path, as of digits."""
    return ", ".join(
        f"{name} {path}" for name, path in data_places(config).items() if os.path.lexists(path)
    )


def check_data_is_elsewhere(run: Path, config: RunConfig, overrides: Sequence[str]) -> None:
    """Check that data and initial weights do not lie in the run folder, unless the user names them there.

    The publisher of a run could put data into it on which any weights look right, or any weights to start from.
    """
    typed = {text.partition("=")[0].strip() for text in overrides}
    folders = {Path(os.path.abspath(run)), run.resolve()}
    for name, path in data_places(config).items():
        if any(name == each or name.startswith(f"{each}.") for each in typed):
            continue
        # A link in the folder came with it too, wherever it leads.
        if any(
            place.is_relative_to(folder) for place in (path, path.resolve()) for folder in folders
        ):
            raise ConfigError(
                f"{name} lies in the run folder: it came with the run",
                given=f"{name}: {path}",
                cause="The publisher of the run chose these files. On data made for them, any weights look right.",
                fix=f"Name your own copy: {name}=PATH. If you trust these files: {name}={path}",
            )
