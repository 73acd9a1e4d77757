"""Comparison of the files of a complete run with its record, the one thing that the root stands for."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samebits.config.document import parse
from samebits.config.given import flat
from samebits.config.load import load, mapping_layer
from samebits.config.plain_file import read_plain
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance.altered import altered_settings
from samebits.provenance.run_files import RunFiles
from samebits.provenance.same_run import result_settings
from samebits.provenance.stated import best_finding
from samebits.provenance.statement import RunRecord, distinct
from samebits.provenance.step_log import FILE_NAME as STEPS
from samebits.provenance.step_log import StepLog
from samebits.recipes.catalog import RecipeSpec
from samebits.report.records import FILE_NAME as METRICS
from samebits.report.records import read_records
from samebits.storage.manifest import WEIGHTS, sha256_of_file

_ENVIRONMENT, _DIFF = "environment.json", "config.diff.yaml"
_MAX_DIFF_BYTES = 4 * 1024 * 1024
# Files and folders that `verify` compares, whole or in the values that a replay has.
COMPARED = frozenset({
    "config.yaml", _DIFF, _ENVIRONMENT, "dataset_info.json", METRICS, "provenance.json", "result.json", STEPS, WEIGHTS,
    "checkpoints",
})  # fmt: skip


def compare_record(files: RunFiles, log: StepLog, config: RunConfig | None) -> tuple[list[str], list[str]]:
    """Compare the files of a complete run with its record.

    Args:
        log: Its record of steps; empty if there is none.
        config: Its settings, as the recipe resolves them; None: those in `config.yaml`.

    Returns:
        Files that contradict the record, and what is missing, one line each.
    """
    run, record, notes = files.path, files.record, list[str]()
    found = altered_settings(files, None if config is None else result_settings(config))
    at = [each.step for each in record.evaluations]
    if at != sorted(set(at)) or not at or at[-1] != record.num_steps:
        found.append(f"provenance.json: its evaluations do not end after step {record.num_steps:,}")
    try:
        found += _of_result(record, log, files.result)
    except CheckpointError as error:
        notes.append(error.what)
    found += [text for text in (best_finding(files),) if text]
    if not os.path.lexists(run / METRICS):
        notes.append(f"{METRICS} is not published")
    else:
        found += _of_evaluations(files) + _of_steps(run, log)
    found += _of_environment(files)
    for name, sha256 in files.subjects.items():
        checkpoint, _, file = name.removeprefix("checkpoints/").partition("/")
        if name not in (WEIGHTS, STEPS):
            there = record.checkpoints.get(checkpoint, {}).get(file, "none")
        elif os.path.lexists(run / name):
            there = _sha256(run / name)
        else:
            found.append(f"{name} is missing, and provenance.json states its sha256 {sha256[:16]}")
            continue
        if there != sha256:
            found.append(hashes(name, there, sha256))
    return found, notes


def hashes(name: str, found: str, recorded: str) -> str:
    """Return the line for a file that has another SHA-256 than recorded.

    Args:
        found: The SHA-256 of its content.
        recorded: The SHA-256 in the statement.
    """
    return f"{name} has sha256 {found[:16]}, recorded {recorded[:16]}"


def not_compared(run: Path) -> list[str]:
    """Return the names of what lies in a run folder, and is not compared with anything."""
    return sorted({path.name for path in run.iterdir() if not path.name.startswith(".")} - COMPARED - {"run.lock"})


def _of_evaluations(files: RunFiles) -> list[str]:
    """Compare the evaluations in `metrics.jsonl` with the recorded ones, up to the first one that differs."""
    evaluations = files.record.evaluations
    recorded = {each.step: each.metrics for each in evaluations}
    for each in files.evaluations:
        before = recorded.get(each.step)
        if each in evaluations:
            continue
        if before is None:
            return [f"{METRICS}: it has an evaluation after step {each.step:,}, which is not recorded"]
        names = [name for name in sorted({**each.metrics, **before}) if each.metrics.get(name) != before.get(name)]
        return [
            f"{METRICS}: {name} after step {each.step:,} is {each.metrics.get(name)}, recorded {before.get(name)}"
            for name in names[:1]
        ]
    return []


def _of_steps(run: Path, log: StepLog) -> list[str]:
    """Compare the training records in `metrics.jsonl` with those of the steps, up to the first one that differs."""
    for record in read_records(run, "train"):
        step = log.get(record["step"] - 1)
        if step is None:
            continue
        for name, value in {"loss": step.loss, "lr": step.lr, "grad_norm": step.norm}.items():
            if record.get(name) != _finite(value):
                return [f"{METRICS}: {name} of step {step.step:,} is {record.get(name)}, recorded {_finite(value)}"]
    return []


def _of_environment(files: RunFiles) -> list[str]:
    """Compare code, versions and hardware in `environment.json` with the recorded ones."""
    if not os.path.lexists(files.path / _ENVIRONMENT):
        return []
    try:
        worlds, record = files.worlds, files.record
    except CheckpointError as error:
        return [f"{_ENVIRONMENT}: {error.slots.get('cause', error.what)}"]
    return [
        f"{_ENVIRONMENT}: the {name} of its worlds is not the recorded one"
        for name, recorded in (("environment", record.environment), ("code", record.code))
        if distinct(each.get(name, {}) for each in worlds) != recorded
    ]


def typed_settings(run: Path, recipe: RecipeSpec) -> list[str]:
    """Compare the settings that the user typed, `config.diff.yaml`, with all settings.

    They are put on top of all settings: whatever form the user typed, such as 1e-3 or a list as text, changes nothing.

    Args:
        recipe: Its recipe, with the settings in `config.yaml`.
    """
    path = run / _DIFF
    if not os.path.lexists(path):
        return []
    try:
        typed = parse(read_plain(path, _MAX_DIFF_BYTES).decode(), _DIFF).values
        typed.pop("recipe", None)
        found = load(recipe.config_class, (*recipe.layers, mapping_layer(typed, _DIFF))).config
    except (OSError, UnicodeDecodeError, SamebitsError) as error:
        return [f"{_DIFF} can't be read: {error}".split(chr(10))[0]]
    now, every = (flat(each.model_dump()) for each in (found, recipe.load().config))
    return [
        f"{_DIFF}: {name} is {now.get(name)}, in config.yaml {every.get(name)}"
        for name in flat(typed)
        if now.get(name) != every.get(name) and not _is_path(now.get(name))
    ]


def _is_path(value: object) -> bool:
    # Relative paths were typed in another folder, from which config.yaml has them absolute.
    return any(isinstance(each, Path) for each in (value if isinstance(value, list | tuple) else [value]))


def _of_result(record: RunRecord, log: StepLog, result: Mapping[str, Any]) -> list[str]:
    found = {name: result.get(name) for name in ("weights_sha256", "chain", "root", "steps")}
    stated: dict[str, Any] = {"weights_sha256": record.weights_sha256, "chain": record.chain, "root": record.root}
    stated["steps"] = record.num_steps
    metrics, best = result.get("metrics"), result.get("best")
    last = record.evaluations[-1].metrics if record.evaluations else {}
    found |= {
        f"metrics.{name}": _finite(value) for name, value in (metrics if isinstance(metrics, dict) else {}).items()
    }
    stated |= {f"metrics.{name}": value for name, value in last.items()}
    if isinstance(best, dict):
        there = [each.metrics for each in record.evaluations if each.step == best.get("step")]
        found["best"] = best.get("value")
        stated["best"] = there[0].get(str(best.get("metric"))) if there else None
    if len(log) == record.num_steps:
        found["skipped_steps"], stated["skipped_steps"] = result.get("skipped_steps"), log.skipped()
    return [
        f"result.json: {name} is {found.get(name)}, recorded {stated.get(name)}"
        for name in sorted(stated.keys() | found.keys())
        if found.get(name) != stated.get(name)
    ]


def _sha256(path: Path) -> str:
    try:
        # A pipe in a stranger's folder would never end.
        return sha256_of_file(path) if path.is_file() else "none"
    except OSError:
        return "none"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
