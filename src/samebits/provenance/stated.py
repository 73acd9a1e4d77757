"""What the statement of a complete run, `provenance.json`, states about the other files in its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from samebits.config.given import flat
from samebits.errors import CheckpointError, ConfigError
from samebits.provenance.same_run import settings_of
from samebits.provenance.statement import FILE_NAME, RunRecord, read_statement
from samebits.storage.checkpoint import BEST
from samebits.storage.manifest import WEIGHTS, manifest_of
from samebits.storage.run_folder import RunFolder

BEST_FILE = f"checkpoints/{BEST}"


def check_stated(run: Path, weights: Path, which: str) -> None:
    """Check that the weights that a command has read are those of the run's statement.

    The hashes in `result.json` and in a manifest show damage. A publisher who replaces weights can replace those hashes
    too, but not the root, which covers the statement.

    Args:
        run: The run folder. Without a statement, as in a run that is not complete, nothing is checked.
        weights: The file or checkpoint folder that was read, whose content is that of `result.json` or its manifest.
        which: "last", "best", or a checkpoint's name.

    Raises:
        CheckpointError: The statement has other weights, no such checkpoint, or another best one; or it is damaged.
    """
    if not os.path.lexists(run / FILE_NAME):
        return
    record = read_statement(run / FILE_NAME)
    if weights.name == WEIGHTS:
        found, stated = RunFolder(run).read_json("result.json").get("weights_sha256"), record.weights_sha256
        if found != stated:
            raise _not_stated(run, weights, f"sha256 {found}", f"sha256 {stated}")
        return
    parts = record.checkpoints.get(weights.name)
    if parts is None:
        raise _not_stated(run, weights / WEIGHTS, weights.name, ", ".join(record.checkpoints) or "no checkpoint")
    manifest = manifest_of(weights)
    for name, stated in parts.items():
        if (found := str(manifest.get(name, {}).get("sha256"))) != stated:
            raise _not_stated(run, weights / name, f"sha256 {found}", f"sha256 {stated}")
    if which == "best" and (text := best_finding(run, record)):
        raise CheckpointError(
            f"the best checkpoint of {run} is not that of its record",
            given=text,
            fix=f"Restore {run / BEST_FILE}, or give a checkpoint by name: {', '.join(record.checkpoints)}.",
        )


def _not_stated(run: Path, file: Path, given: str, allowed: str) -> CheckpointError:
    return CheckpointError(
        f"{file} is not the file that {run / FILE_NAME} states",
        given=given,
        allowed=allowed,
        cause="It was replaced or added after the run had ended.",
        fix=f"Restore the run folder; or open the file as it is: {file} --preset {run / 'config.yaml'}",
    )


def best_finding(run: Path, record: RunRecord) -> str:
    """Compare `best.json`, which names the checkpoint that `--checkpoint best` takes, with the recorded evaluations.

    Returns:
        What contradicts them; empty if nothing does, or there is no such file.
    """
    if not os.path.lexists(run / BEST_FILE):
        return ""
    try:
        best = RunFolder(run).read_json(BEST_FILE)
    except CheckpointError as error:
        return f"{BEST_FILE}: {error.slots.get('cause', error.what)}"
    name, step, value = str(best.get("metric")), best.get("step"), best.get("value")
    values = {each.step: each.metrics.get(name) for each in record.evaluations}
    known = [each for each in values.values() if each is not None]
    is_best = known and value == (max(known) if best.get("better") == "max" else min(known))
    if is_best and value in [each for at, each in values.items() if at == step]:
        return ""
    return f"{BEST_FILE}: {name} {value} after step {step} is not the best of the recorded evaluations"


def altered_settings(run: Path, record: RunRecord, now: dict[str, Any] | None = None) -> list[str]:
    """Compare settings with those that the statement has, one line for each that differs.

    Args:
        run: The run folder.
        record: Its record.
        now: The settings that determine the result, as the recipe resolves them, by dotted name; None: those in
            `config.yaml`, which has all of them, so that no recipe is imported.

    Returns:
        The lines, such as "config.yaml: seed is 1, recorded 0".
    """
    if now is None:
        try:
            values = flat(settings_of(RunFolder(run)))
        except ConfigError as error:
            return [f"config.yaml: {error.what}"]
        now = {name: values[name] for name in record.settings if name in values}
        now["recipe"] = Path(str(values.get("recipe"))).name
    found = json.loads(json.dumps(now, default=str))  # lists for tuples, as in the statement
    return [
        f"config.yaml: {name} is {found.get(name)}, recorded {record.settings.get(name)}"
        for name in sorted(record.settings.keys() | found.keys())
        if found.get(name) != record.settings.get(name)
    ]


def altered_in(run: Path) -> list[str]:
    """Compare `config.yaml` with the statement, as `altered_settings` does; nothing if there is no statement."""
    if not os.path.lexists(run / FILE_NAME):
        return []
    try:
        return altered_settings(run, read_statement(run / FILE_NAME))
    except CheckpointError as error:
        return [error.line]
