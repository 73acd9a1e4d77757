"""From the command line to a sweep: its definition, its folder, and the training of its trials."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from samebits.errors import CheckpointError, ConfigError
from samebits.recipes.catalog import command_arguments, find
from samebits.recipes.trust import check_tracker_files, trust_named
from samebits.storage.run_folder import new_folder
from samebits.storage.run_lock import RunLock
from samebits.sweeps.grid import combinations, parse_grid, parse_space
from samebits.sweeps.state_file import SearchSpec, Sweep, is_sweep

_TYPED = ("report.trackers=",)  # the user typed the values to try, so the trackers among them are the user's


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
            raise ConfigError(f"{key} is given both as {text} and with values to try", fix=f"Remove {text}.")
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
            f"{given} already holds a sweep", fix=f"Resume it with samebits sweep {given}, or give another --sweep-dir."
        )
    try:
        given.mkdir(parents=True, exist_ok=True)
        if any(not name.startswith(".") for name in os.listdir(given)):  # a killed command leaves partial files
            raise CheckpointError(f"{given} is not empty", fix="Give another --sweep-dir.")
    except OSError as error:
        raise CheckpointError(
            f"can't write {given}: {error.strerror}", fix="Give a --sweep-dir that can be written."
        ) from None
    return given


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a sweep for this process. Raises CheckpointError if another process holds the lock."""
    lock = RunLock(folder)
    try:
        lock.take()
    except CheckpointError as error:
        if "in use" not in error.what:
            raise
        raise error.with_slots(
            f"sweep {folder} is in use", fix="Wait for that process, or stop it; its trials save and can be resumed."
        ) from None
    try:
        yield
    finally:
        lock.release()
