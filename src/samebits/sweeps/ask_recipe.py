"""Ask a recipe, in a process of its own, what only it knows about the trials of a sweep."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from samebits.cluster.signals import StopSignal
from samebits.config.given import flat
from samebits.config.plain_file import MAX_MEMORY_BYTES, parse_json, read_plain
from samebits.errors import LaunchError
from samebits.launch.commands import SAMEBITS
from samebits.launch.subcommand import Subcommand
from samebits.provenance.same_run import plain_settings
from samebits.sweeps.prefixes import groups_of
from samebits.sweeps.runner import OUTPUT
from samebits.sweeps.state_file import Group, Sweep

PROBE = "probe"
_MAX_PROBE_BYTES = 64 * 1024 * 1024


def ask_recipe(sweep: Sweep, folder: Path, stop: StopSignal) -> None:
    """Ask the recipe, in a process of its own, what only it knows about the trials; the answer is stored.

    Args:
        sweep: The sweep; groups and metric are added.
        folder: Its folder.
        stop: Set by a signal; nothing is stored then.

    Raises:
        SamebitsError: The recipe failed.
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
        command = Subcommand([*SAMEBITS, "sweep-part", str(folder), PROBE], error_file, output=output)
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
    """Build the recipe in this process and write what it knows about the trials; see `ask_recipe`."""
    from samebits.sweeps.probe import probe

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
