"""A sweep: its values from the command line, its folder with `sweep.json`, and the training of its trials."""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from samebits.config.load import Loaded
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError, cannot_read
from samebits.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.recipes.catalog import RecipeSpec, command_arguments, expand_user, find
from samebits.recipes.trust import check_tracker_files, check_trusted, read_recipe, trust_named
from samebits.storage.run_folder import check_entries, check_no_links, new_folder, write_atomically
from samebits.storage.run_lock import RunLock

# The values of a sweep, as texts of the command line: `optim.lr=0.1,0.03 seed=0:3`, or ranges to search in.


MAX_TRIALS = 10_000
_RANGE = re.compile(r"(-?\d{1,9}):(-?\d{1,9})(?::(\d{1,9}))?")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_INTERVAL = re.compile(rf"({_NUMBER}):({_NUMBER})(:log)?")
_CLOSING = {"[": "]", "{": "}", "'": "'", '"': '"'}


@dataclass(frozen=True)
class Axis:
    """A setting and the values that a sweep gives it."""

    key: str  #: Its dotted name.
    values: tuple[str, ...]  #: The values, as the command line has them.


@dataclass(frozen=True)
class SearchInterval:
    """A setting and the interval that a search chooses its values from."""

    key: str  #: Its dotted name.
    low: float  #: Lowest value.
    high: float  #: Highest value, included.
    is_log: bool  #: Whether the logarithm of the value is distributed evenly.
    is_whole: bool  #: Whether the values are whole numbers.


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """Parse the values of `--grid`. Raises ConfigError if a text has another form, or a setting is named twice."""
    axes = [_axis(text, "--grid") for text in texts]
    _check_names([axis.key for axis in axes], "--grid")
    return axes


def parse_space(texts: Sequence[str]) -> list[Axis | SearchInterval]:
    """Parse the values of `--space`: `optim.lr=1e-4:1e-1:log`, `model.width=16:64`, `optim.name=sgd,adamw`.

    Raises:
        ConfigError: A text has another form, or a setting is named twice.
    """
    dimensions = [_dimension(text) for text in texts]
    _check_names([each.key for each in dimensions], "--space")
    return dimensions


def combinations(axes: Sequence[Axis]) -> list[list[str]]:
    """Return the settings of each trial, as overrides; the last axis changes fastest.

    Raises:
        ConfigError: There are too many.
    """
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_TRIALS:
        raise ConfigError(
            f"the grid has {count:,} trials",
            allowed=f"at most {MAX_TRIALS:,}",
            fix="Name fewer values.",
        )
    columns = [[f"{axis.key}={value}" for value in axis.values] for axis in axes]
    return [list(each) for each in itertools.product(*columns)]


def _axis(text: str, option: str) -> Axis:
    key, equals, rest = text.partition("=")
    values = [each for piece in _pieces(rest) for each in _expanded(piece)]
    if not equals or not key.strip() or not all(values):
        raise ConfigError(
            f"{option} has {text!r}",
            allowed="KEY=VALUE,VALUE or KEY=START:STOP, such as optim.lr=0.1,0.03 seed=0:3",
            fix="Write the values without spaces; put a list or a text with a comma in brackets or quotes.",
        )
    if len(set(values)) < len(values):
        raise ConfigError(
            f"{option} has a value of {key} twice", given=text, fix="Name each value once."
        )
    return Axis(key.strip(), tuple(values))


def _expanded(piece: str) -> list[str]:
    """Return the numbers of a range such as 0:3, which are 0, 1 and 2; any other text as it is."""
    match = _RANGE.fullmatch(piece)
    if match is None:
        return [piece]
    numbers = range(int(match[1]), int(match[2]), int(match[3] or 1) or 1)
    # Before a list is made of it: a range knows its length without its numbers.
    if len(numbers) > MAX_TRIALS:
        raise ConfigError(
            f"the range {piece} has {len(numbers):,} values",
            allowed=f"at most {MAX_TRIALS:,}",
            fix="Name fewer.",
        )
    # An empty range becomes an empty text, which `_axis` refuses.
    return [str(number) for number in numbers] or [""]


def _pieces(text: str) -> list[str]:
    """Split at the commas that are outside of brackets and quotes."""
    pieces = [""]
    closing = list[str]()
    for char in text:
        if char == "," and not closing:
            pieces.append("")
            continue
        if closing and char == closing[-1]:
            closing.pop()
        elif char in _CLOSING and not (closing and closing[-1] in "'\""):
            closing.append(_CLOSING[char])
        pieces[-1] += char
    return [piece.strip() for piece in pieces]


def _dimension(text: str) -> Axis | SearchInterval:
    key, _, rest = text.partition("=")
    match = _INTERVAL.fullmatch(rest.strip())
    if match is None:
        return _axis(text, "--space")
    low = float(match[1])
    high = float(match[2])
    is_log = match[3] is not None
    if not key.strip() or not low < high or (is_log and low <= 0):
        raise ConfigError(
            f"--space has {text!r}",
            allowed="KEY=LOW:HIGH with LOW below HIGH, and above 0 with :log",
            fix="Give an interval such as optim.lr=1e-4:1e-1:log.",
        )
    is_whole = all(re.fullmatch(r"[+-]?\d+", match[number]) for number in (1, 2))
    return SearchInterval(key.strip(), low, high, is_log, is_whole)


def _check_names(keys: Sequence[str], option: str) -> None:
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(
                f"{option} names {key} twice", fix="Name each setting once, with all of its values."
            )


# `sweep.json`: what a sweep trains, and what only the sweep knows about its trials. All else is in the run folders.
#
# The file is replaced as a whole, so a killed sweep leaves one that can be resumed from.


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
    metric: str = (
        ""  #: Name of the metric that the recipe monitors; empty until a trial has an evaluation.
    )
    better: Literal["max", "min"] = "max"  #: Whether its "max" or "min" is best.
    search: SearchSpec | None = None  #: The search; None for a grid.
    #: How trials of a search ended, by number.
    outcomes: dict[Number, TrialOutcome] = field(default_factory=dict)

    @cached_property
    def recipe(self) -> RecipeSpec:
        """The recipe."""
        return find(self.arguments[0])

    def load(self, overrides: Sequence[str]) -> Loaded[RunConfig]:
        """Return the settings of a trial."""
        return self.recipe.load([*self.arguments[1:], *overrides])

    def write(self, folder: Path) -> None:
        """Write the file. Raises CheckpointError if it cannot be written."""
        plain = {
            "format": _FORMAT,
            **{each.name: getattr(self, each.name) for each in fields(self)},
        }
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
            f"{path} is not the file of a sweep",
            cause=str(error).replace("\n", " ")[:200],
            fix="Restore the file.",
        ) from None


def check_recipe(sweep: Sweep, folder: Path) -> None:
    """Check that the user trusts the recipe file of a sweep: the folder may be a stranger's."""
    # a path, as `find` takes it: "evil.py/" is evil.py too
    source = expand_user(sweep.arguments[0])
    if source.suffix in (
        ".yaml",
        ".yml",
    ):  # its layers would be read again, and it may name any recipe file
        raise ConfigError(
            f"{folder / FILE_NAME} was altered: it names {source}", fix="Restore the file."
        )
    if source.suffix == ".py":
        path = source.resolve()
        check_trusted(path, read_recipe(path), str(folder / FILE_NAME))


def settings_of(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return overrides by name, with values as they were typed."""
    return {key: value for key, _, value in (text.partition("=") for text in overrides)}


# From the command line to a sweep: its definition, its folder, and the training of its trials.


_TYPED = (
    "report.trackers=",
)  # the user typed the values to try, so the trackers among them are the user's


def define_grid(source: str, overrides: Sequence[str], grid: Sequence[str]) -> Sweep:
    """Return the sweep over a grid, with the settings of each trial checked.

    Raises:
        ConfigError: A setting or a value is not allowed.
    """
    axes = parse_grid(grid)
    sweep = _define(source, overrides, [axis.key for axis in axes])
    sweep.trials = combinations(axes)
    for trial in sweep.trials:
        check_tracker_files(sweep.load(trial).config.report.trackers, _TYPED)
    return sweep


def define_search(source: str, overrides: Sequence[str], spec: SearchSpec) -> Sweep:
    """Return a search, with the ends of its intervals checked.

    Raises:
        ConfigError: A setting or a value is not allowed.
    """
    space = parse_space(spec.space)
    sweep = _define(source, overrides, [each.key for each in space])
    sweep.search = spec
    for text in spec.space:
        key, _, rest = text.partition("=")
        for value in rest.removesuffix(":log").split(":") if ":" in rest else ():
            sweep.load([f"{key}={value}"])
    for each in combinations(parse_grid([text for text in spec.space if ":" not in text])):
        check_tracker_files(sweep.load(each).config.report.trackers, _TYPED)
    return sweep


def _define(source: str, overrides: Sequence[str], keys: list[str]) -> Sweep:
    for text in overrides:
        if (key := text.partition("=")[0]) in keys:
            raise ConfigError(
                f"{key} is given both as {text} and with values to try", fix=f"Remove {text}."
            )
    found = find(source)
    loaded = found.load(overrides)
    check_tracker_files(loaded.config.report.trackers, list(overrides))
    trust_named(source)
    return Sweep(command_arguments(found, loaded.diff), keys, [])


def make_folder(name: str, given: Path | None) -> Path:
    """Create the folder of a sweep.

    Args:
        given: The folder that the user named; None: a new one below runs/.

    Raises:
        CheckpointError: It cannot be created, or is not empty.
    """
    if given is None:
        return new_folder(f"{name}-sweep")
    if is_sweep(given):
        raise CheckpointError(
            f"{given} already holds a sweep",
            fix=f"Resume it with samebits sweep {given}, or give another --sweep-dir.",
        )
    try:
        given.mkdir(parents=True, exist_ok=True)
        if any(
            not name.startswith(".") for name in os.listdir(given)
        ):  # a killed command leaves partial files
            raise CheckpointError(f"{given} is not empty", fix="Give another --sweep-dir.")
    except OSError as error:
        raise CheckpointError(
            f"can't write {given}: {error.strerror}", fix="Give a --sweep-dir that can be written."
        ) from None
    return given


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a sweep for this process.

    Raises:
        CheckpointError: Another process holds the lock, or a link in the folder leads elsewhere.
    """
    check_entries(folder)
    check_no_links(folder.glob("trial-*"))
    lock = RunLock(folder)
    try:
        lock.take()
    except CheckpointError as error:
        if "in use" not in error.what:
            raise
        raise error.with_slots(
            f"sweep {folder} is in use",
            fix="Wait for that process, or stop it; its trials save and can be resumed.",
        ) from None
    try:
        yield
    finally:
        lock.release()
