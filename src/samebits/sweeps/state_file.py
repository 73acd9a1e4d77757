"""`sweep.json`: what a sweep trains, and what only the sweep knows about its trials. All else is in the run folders.

The file is replaced as a whole, so a killed sweep leaves one that can be resumed from.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from samebits.config.load import Loaded
from samebits.config.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError, cannot_read
from samebits.recipes.catalog import RecipeSpec, find
from samebits.recipes.recipe_file import expand_user
from samebits.recipes.trust import check_trusted, read_recipe
from samebits.storage.run_folder import write_atomically
from samebits.sweeps.grid import MAX_TRIALS

FILE_NAME = "sweep.json"
_FORMAT = 1
_MAX_BYTES = 64 * 1024 * 1024
Number = Annotated[int, Field(ge=0, lt=MAX_TRIALS)]


def trial_name(number: int) -> str:
    """Return the name of a trial's run folder."""
    return f"trial-{number + 1:04}"


@dataclass(frozen=True)
class SearchSpec:
    """A search, as the user requested it."""

    space: list[str]  #: Settings with their intervals or values, as on the command line.
    num_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)]  #: Number of trials.
    #: A trial is chosen from the results of the trials up to this many before it, so that the choice does not depend on
    #: which of the trials side by side ends first.
    lag: Annotated[int, Field(ge=1)]
    seed: int = 0  #: Seed of the search.
    prunes: bool = True  #: Whether trials with worse values than the median are stopped.


@dataclass(frozen=True)
class TrialOutcome:
    """The end of a trial of a search."""

    state: Literal["done", "pruned", "failed"]  #: done; pruned; or failed.
    #: Step and value of the metric of each evaluation; None is a value that is not finite.
    values: list[tuple[int, float | None]] = field(default_factory=list)
    reason: str = ""  #: Why it failed.


@dataclass
class Sweep:
    """A sweep."""

    #: Recipe and common settings, as arguments of `samebits train`.
    arguments: Annotated[list[str], Field(min_length=1)]
    keys: list[str]  #: Names of the settings that differ between trials.
    trials: list[list[str]]  #: The settings of each trial, as overrides.
    metric: str = ""  #: Name of the metric that the recipe monitors; empty until a trial has an evaluation.
    better: Literal["max", "min"] = "max"  #: Whether its "max" or "min" is best.
    search: SearchSpec | None = None  #: The search; None for a grid.
    outcomes: dict[Number, TrialOutcome] = field(default_factory=dict)  #: How trials of a search ended, by number.

    @cached_property
    def recipe(self) -> RecipeSpec:
        """The recipe."""
        return find(self.arguments[0])

    def load(self, overrides: Sequence[str]) -> Loaded[RunConfig]:
        """Return the settings of a trial."""
        return self.recipe.load([*self.arguments[1:], *overrides])

    def write(self, folder: Path) -> None:
        """Write the file. Raises CheckpointError if it cannot be written."""
        plain = {"format": _FORMAT, **{each.name: getattr(self, each.name) for each in fields(self)}}
        write_atomically(folder / FILE_NAME, json_text(plain, indent=1, default=asdict) + b"\n")


def is_sweep(folder: Path) -> bool:
    """Return whether a folder holds a sweep."""
    return os.path.lexists(folder / FILE_NAME)


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep. Raises CheckpointError if the file is damaged, or of another version."""
    path = folder / FILE_NAME
    try:
        plain = parse_json(read_plain(path, _MAX_BYTES), MAX_MEMORY_BYTES)
        if not isinstance(plain, dict) or plain.pop("format", None) != _FORMAT:
            raise ValueError("it is of another version")
        sweep = TypeAdapter(Sweep).validate_python(plain)
        if any(number >= len(sweep.trials) for number in sweep.outcomes):
            raise ValueError(f"it has {len(sweep.trials)} trials, and outcomes of others")
        return sweep
    except OSError as error:
        raise cannot_read(CheckpointError, path, error, "Give the folder of a sweep.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not the file of a sweep", cause=str(error).replace("\n", " ")[:200], fix="Restore the file."
        ) from None


def check_recipe(sweep: Sweep, folder: Path) -> None:
    """Check that the user trusts the recipe file of a sweep: the folder may be a stranger's."""
    source = expand_user(sweep.arguments[0])  # a path, as `find` takes it: "evil.py/" is evil.py too
    if source.suffix in (".yaml", ".yml"):  # its layers would be read again, and it may name any recipe file
        raise ConfigError(f"{folder / FILE_NAME} was altered: it names {source}", fix="Restore the file.")
    if source.suffix == ".py":
        path = source.resolve()
        check_trusted(path, read_recipe(path), str(folder / FILE_NAME))


def settings_of(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return overrides by name, with values as they were typed."""
    return {key: value for key, _, value in (text.partition("=") for text in overrides)}
