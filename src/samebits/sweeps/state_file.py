"""A sweep: its values from the command line, and its folder with `sweep.json`."""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from samebits.config.load import Loaded
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError, cannot_read
from samebits.plain_file import MAX_MEMORY_BYTES, json_text, parse_json, read_plain
from samebits.recipes.catalog import RecipeSpec, command_arguments, expand_user, find
from samebits.recipes.trust import check_tracker_files, check_trusted, read_recipe, trust_named
from samebits.storage.run_folder import check_entries, check_no_links, new_folder, write_atomically
from samebits.storage.run_lock import RunLock

# The values of a sweep, as texts of the command line: `optim.lr=0.1,0.03 seed=0:3`.


MAX_TRIALS = 10_000
_RANGE = re.compile(r"(-?\d{1,9}):(-?\d{1,9})(?::(\d{1,9}))?")
_CLOSING = {"[": "]", "{": "}", "'": "'", '"': '"'}


@dataclass(frozen=True)
class Axis:
    """A setting and the values that a sweep gives it."""

    key: str  #: Its dotted name.
    values: tuple[str, ...]  #: The values, as the command line has them.


def parse_grid(texts: Sequence[str]) -> list[Axis]:
    """Parse the values of `--grid`. Raises ConfigError if a text has another form, or a setting is named twice."""
    axes = list(map(_axis, texts))
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(
                f"--grid names {key} twice", fix="Name each setting once, with all of its values."
            )
    return axes


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


def _axis(text: str) -> Axis:
    key, equals, rest = text.partition("=")
    values = [each for piece in _pieces(rest) for each in _expanded(piece)]
    if not equals or not key.strip() or not all(values):
        raise ConfigError(
            f"--grid has {text!r}",
            allowed="KEY=VALUE,VALUE or KEY=START:STOP, such as optim.lr=0.1,0.03 seed=0:3",
            fix="Write the values without spaces; put a list or a text with a comma in brackets or quotes.",
        )
    if len(set(values)) < len(values):
        raise ConfigError(
            f"--grid has a value of {key} twice", given=text, fix="Name each value once."
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


# `sweep.json`: what a sweep trains. All else is in the run folders, so a killed sweep can be resumed from them.


FILE_NAME = "sweep.json"
_FORMAT = 1
_MAX_BYTES = 64 * 1024 * 1024


def trial_name(number: int) -> str:
    """Return the name of a trial's run folder."""
    return f"trial-{number + 1:04}"


@dataclass
class Sweep:
    """A sweep."""

    #: Recipe and common settings, as arguments of `samebits train`.
    arguments: Annotated[list[str], Field(min_length=1)]
    keys: list[str]  #: Names of the settings that differ between trials.
    #: The settings of each trial, as overrides.
    trials: Annotated[list[list[str]], Field(min_length=1)]

    @cached_property
    def recipe(self) -> RecipeSpec:
        """The recipe."""
        return find(self.arguments[0])

    def load(self, overrides: Sequence[str]) -> Loaded[RunConfig]:
        """Return the settings of a trial."""
        return self.recipe.load([*self.arguments[1:], *overrides])

    def write(self, folder: Path) -> None:
        """Write the file. Raises CheckpointError if it cannot be written."""
        content = json_text({"format": _FORMAT, **asdict(self)}, indent=1)
        write_atomically(folder / FILE_NAME, content + b"\n")


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
        if plain.get(
            "search"
        ):  # of a version that had one: its trials are run folders all the same
            raise ValueError("it is of a search, and sweeps are grids")
        return TypeAdapter(Sweep).validate_python(plain)
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
    keys = [axis.key for axis in axes]
    for text in overrides:
        if (key := text.partition("=")[0]) in keys:
            raise ConfigError(
                f"{key} is given both as {text} and with values to try", fix=f"Remove {text}."
            )
    found = find(source)
    loaded = found.load(overrides)
    check_tracker_files(loaded.config.report.trackers, list(overrides))
    trust_named(source)
    sweep = Sweep(command_arguments(found, loaded), keys, combinations(axes))
    for trial in sweep.trials:
        check_tracker_files(sweep.load(trial).config.report.trackers, _TYPED)
    return sweep


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
