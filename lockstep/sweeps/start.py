"""From the command line to a sweep: its folder, what its recipe says about it, its trials, and the rest of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.cluster.signals import StopSignal
from lockstep.config.given import flat
from lockstep.config.load import load
from lockstep.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain
from lockstep.errors import CheckpointError, ConfigError, LaunchError
from lockstep.launch.commands import LOCKSTEP
from lockstep.launch.subcommand import Subcommand
from lockstep.provenance.same_run import plain_settings
from lockstep.recipes.catalog import command_arguments, find
from lockstep.recipes.trust import check_tracker_files, trust_named
from lockstep.storage.run_folder import new_folder
from lockstep.storage.run_lock import RunLock
from lockstep.sweeps.agenda import Agenda, Grid
from lockstep.sweeps.grid import combinations, parse_grid, parse_space
from lockstep.sweeps.prefixes import Part, groups_of
from lockstep.sweeps.runner import OUTPUT, Runner
from lockstep.sweeps.slots import Slot
from lockstep.sweeps.state_file import Group, SearchSpec, Sweep, is_sweep

PROBE = "probe"
_MAX_PROBE_BYTES = 64 * 1024 * 1024


def define_grid(source: str, overrides: Sequence[str], grid: Sequence[str], *, is_shared: bool) -> Sweep:
    """Return the sweep over a grid, with the settings of each trial checked.

    Args:
        source: The recipe.
        overrides: Settings of all trials.
        grid: Settings with their values.
        is_shared: Whether trials share steps.

    Raises:
        ConfigError: A setting or a value is not allowed.
    """
    axes = parse_grid(grid)
    sweep = _define(source, overrides, [axis.key for axis in axes])
    sweep.trials, sweep.is_shared = combinations(axes), is_shared
    for trial in sweep.trials:
        sweep.load(trial)
    return sweep


def define_search(source: str, overrides: Sequence[str], spec: SearchSpec) -> Sweep:
    """Return a search, with the ends of its intervals checked.

    Args:
        source: The recipe.
        overrides: Settings of all trials.
        spec: The search.

    Raises:
        ConfigError: A setting or a value is not allowed.
    """
    space = parse_space(spec.space)
    sweep = _define(source, overrides, [each.key for each in space])
    sweep.search, sweep.is_shared = spec, False
    for text in spec.space:
        key, _, rest = text.partition("=")
        for value in rest.removesuffix(":log").split(":") if ":" in rest else ():
            sweep.load([f"{key}={value}"])
    for each in combinations(parse_grid([text for text in spec.space if ":" not in text])):
        sweep.load(each)
    return sweep


def _define(source: str, overrides: Sequence[str], keys: list[str]) -> Sweep:
    for text in overrides:
        if (key := text.partition("=")[0]) in keys:
            raise ConfigError(f"{key} is given both as {text} and with values to try", fix=f"Remove {text}.")
    found = find(source)
    loaded = load(found.config_class, found.layers, overrides)
    check_tracker_files(loaded.config.report.trackers, list(overrides))
    trust_named(source)
    return Sweep(command_arguments(found, loaded.diff), keys, [])


def make_folder(name: str, given: Path | None) -> Path:
    """Create the folder of a sweep.

    Args:
        name: Name of the recipe.
        given: The folder that the user named; None: a new one below runs/.

    Raises:
        CheckpointError: It cannot be created, or is not empty.
    """
    if given is None:
        return new_folder(f"{name}-sweep")
    if is_sweep(given):
        raise CheckpointError(
            f"{given} already holds a sweep", fix=f"Resume it with lockstep sweep {given}, or give another --sweep-dir."
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
    """Lock a sweep for this process.

    Raises:
        CheckpointError: Another process holds the lock.
    """
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


def ask_recipe(sweep: Sweep, folder: Path, stop: StopSignal) -> None:
    """Ask the recipe, in a process of its own, what only it knows about the trials; the answer is stored.

    Args:
        sweep: The sweep; groups and metric are added.
        folder: Its folder.
        stop: Set by a signal; nothing is stored then.

    Raises:
        LockstepError: The recipe failed.
    """
    if sweep.groups or sweep.metric:
        return
    configs = [sweep.load(trial).config for trial in sweep.trials]
    if sweep.search is None and not (sweep.is_shared and groups_of(configs)):
        return
    place = folder / OUTPUT
    place.mkdir(exist_ok=True)
    answer, error_file = place / f"{PROBE}-answer.json", place / f"{PROBE}.json"
    for path in (answer, error_file):
        path.unlink(missing_ok=True)
    with open(place / f"{PROBE}.txt", "wb") as output:
        command = Subcommand([*LOCKSTEP, "sweep-part", str(folder), PROBE], error_file, output=output)
        while command.process.poll() is None:
            if stop.requested:
                command.process.terminate()
            time.sleep(0.05)
    if stop.requested:
        return
    text = (place / f"{PROBE}.txt").read_text(encoding="utf-8", errors="replace")
    if error := command.error(text.strip()):
        raise error
    if command.process.returncode:
        raise LaunchError(f"the recipe ended with exit code {command.process.returncode}", fix="Train it alone first.")
    plain = parse_json(read_plain(answer, _MAX_PROBE_BYTES), MAX_MEMORY_BYTES)
    sweep.groups = [Group(**each) for each in plain["groups"]]
    sweep.metric, sweep.better = plain["metric"], plain["better"]
    sweep.write(folder)


def answer_for(sweep: Sweep, folder: Path) -> None:
    """Build the recipe in this process and write what it says about the trials; see `ask_recipe`."""
    from lockstep.sweeps.probe import probe

    configs = [sweep.load(trial).config for trial in sweep.trials]
    groups, metric, better = list[dict[str, Any]](), "", "max"
    if sweep.search is not None:
        found = probe(sweep.recipe, sweep.load([]).config)
        metric, better = found.metric, found.better
    for numbers in groups_of(configs) if sweep.is_shared else ():
        found = probe(sweep.recipe, configs[numbers[0]])
        metric, better = found.metric, found.better
        settings = [flat(plain_settings(configs[number])) for number in numbers]
        reads = [name for name in found.reads if any(each[name] != settings[0][name] for each in settings)]
        groups.append(asdict(Group(numbers, found.steps_per_epoch, reads)))
    content = {"groups": groups, "metric": metric, "better": better}
    (folder / OUTPUT / f"{PROBE}-answer.json").write_text(json.dumps(content), encoding="utf-8")


def fill_part(sweep: Sweep, folder: Path, part: Part) -> str:
    """Fill the folder of a part with the state of its donor.

    Args:
        sweep: The sweep.
        folder: Its folder.
        part: The part.

    Returns:
        A line for the user if it has to train all of its steps; otherwise an empty text.
    """
    from lockstep.sweeps.handover import hand_over  # late: it imports torch

    assert part.donor is not None
    group = _group_of(sweep, part)
    monitor = (sweep.metric, sweep.better)
    loaded = sweep.load(sweep.trials[part.trial])
    step = hand_over(folder / part.donor, folder / part.name, loaded, group.steps_per_epoch, monitor)
    return "" if step is not None else f"{part.name}  no checkpoint of {part.donor} can be used: it trains all steps"


def has_reached(sweep: Sweep, folder: Path, part: Part) -> bool:
    """Return whether a prefix has all of its steps.

    Args:
        sweep: The sweep.
        folder: Its folder.
        part: The prefix.
    """
    if not (folder / part.name / "checkpoints").exists():
        return False
    from lockstep.sweeps.handover import is_at  # late: it imports torch

    assert part.stop_after is not None
    config = sweep.load(sweep.trials[part.trial]).config
    return is_at(folder / part.name, part.stop_after, config, _group_of(sweep, part).steps_per_epoch)


def _group_of(sweep: Sweep, part: Part) -> Group:
    return next(group for group in sweep.groups if part.trial in group.trials)


def train_all(
    sweep: Sweep,
    folder: Path,
    slots: Sequence[Slot],
    procs: int,
    stop: StopSignal,
    notify: Callable[[str], None],
    show: Callable[[int, int], None],
) -> dict[str, str]:
    """Train what is left of a sweep.

    Args:
        sweep: The sweep.
        folder: Its folder.
        slots: Places for trials.
        procs: Processes of each trial.
        stop: Set by a signal.
        notify: Reports a line.
        show: Shows how many parts are being trained, and how many trials have ended.

    Returns:
        Why parts failed, by name.
    """
    agenda: Agenda
    if sweep.search is None:
        agenda = grid = Grid(sweep, folder, lambda part: has_reached(sweep, folder, part))
        reasons = grid.reasons
    else:
        from lockstep.sweeps.search import Search

        agenda = search = Search(sweep, folder)
        reasons = search.reasons
    runner = Runner(folder, sweep, slots, procs, lambda part: fill_part(sweep, folder, part), notify, show)
    runner.run(agenda, stop)
    return reasons
