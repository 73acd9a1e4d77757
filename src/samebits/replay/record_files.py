"""Comparison of the files of a complete run with its record, the one thing that the root stands for."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from samebits.config.document import mapping_layer, parse
from samebits.config.given import flat
from samebits.config.load import load
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, SamebitsError
from samebits.plain_file import read_plain
from samebits.provenance.identity import (
    altered_settings,
    best_finding,
    is_path,
    not_the_best,
    result_settings,
)
from samebits.provenance.record import (
    BEST_FILE,
    EVAL_BATCH,
    STEPS_FILE,
    RunStatement,
    StepLog,
    distinct,
    environments,
)
from samebits.provenance.run_files import MAX_RECORDS, RunFiles
from samebits.recipes.catalog import RecipeSpec
from samebits.report.records import FILE_NAME as METRICS
from samebits.report.records import iterate_records
from samebits.storage.checkpoint import name_of, steps
from samebits.storage.manifest import WEIGHTS, check_size, manifest_of, sha256_of_file

_ENVIRONMENT = "environment.json"
_DIFF = "config.diff.yaml"
_MAX_DIFF_BYTES = 4 * 1024 * 1024
Evaluations = Mapping[int, Mapping[str, Any]]  # step -> metrics
_STATED = ("code", "environment", "data")  # of a record: what a publisher could leave empty
# Files and folders that `verify` compares, whole or in the values that a replay has.
COMPARED = frozenset({
    "config.yaml", _DIFF, _ENVIRONMENT, "dataset_info.json", METRICS, "provenance.json", "result.json", WEIGHTS,
    STEPS_FILE, "checkpoints", "config.json",
})  # fmt: skip


def compare_record(
    files: RunFiles, log: StepLog, config: RunConfig | None
) -> tuple[list[str], list[str]]:
    """Compare the files of a complete run with its record.

    Args:
        log: Its record of steps; empty if there is none.
        config: Its settings, as the recipe resolves them; None: those in `config.yaml`.

    Returns:
        Files that contradict the record, and what is missing, one line each.
    """
    run = files.path
    record = files.record
    notes = list[str]()
    found = altered_settings(files, None if config is None else result_settings(config))
    at = [each.step for each in record.evaluations]
    if at != sorted(set(at)) or not at or at[-1] != record.num_steps:
        found.append(f"provenance.json: its evaluations do not end after step {record.num_steps:,}")
    try:
        found += _of_result(record, log, files.result)
    except CheckpointError as error:
        notes.append(error.what)
    found += filter(None, [best_finding(files)])
    if not os.path.lexists(run / METRICS):
        notes.append(f"{METRICS} is not published")
    else:
        differing, missing = _of_evaluations(files)
        found += differing + _of_steps(run, log)
        notes += missing
    found += _of_environment(files)
    empty = [name for name in _STATED if not any(getattr(record, name))]
    notes += [f"not stated: the run's {', '.join(empty)}"] * bool(empty)
    recorded = {
        f"checkpoints/{name}/{file}": sha256
        for name, parts in record.checkpoints.items()
        for file, sha256 in parts.items()
    }
    found += [
        f"provenance.json: its subjects do not name {name}"
        for name in sorted({WEIGHTS, *recorded} - files.subjects.keys())
    ]
    for name, sha256 in files.subjects.items():
        if name not in (WEIGHTS, STEPS_FILE):
            there = recorded.get(name, "none")
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
    return sorted(
        {path.name for path in run.iterdir() if not path.name.startswith(".")}
        - COMPARED
        - {"run.lock"}
    )


def _of_evaluations(files: RunFiles) -> tuple[list[str], list[str]]:
    """Compare the evaluations in `metrics.jsonl` with the recorded ones.

    Returns:
        The first one that differs, and the first one that is missing, one line each.
    """
    recorded = {each.step: each.metrics for each in files.record.evaluations}
    missing = dict.fromkeys(recorded)
    found = list[str]()
    for each in files.evaluations():
        missing.pop(each.step, None)
        before = recorded.get(each.step)
        if found or each.metrics == before:
            continue
        after = f"after step {each.step:,}"
        if before is None:
            found.append(f"{METRICS}: it has an evaluation {after}, which is not recorded")
            continue
        name = min(
            name
            for name in each.metrics.keys() | before.keys()
            if each.metrics.get(name) != before.get(name)
        )
        found.append(
            f"{METRICS}: {name} {after} is {each.metrics.get(name)}, recorded {before.get(name)}"
        )
    return found, [
        f"{METRICS} does not have the recorded evaluation after step {step:,}" for step in missing
    ][:1]


def _of_steps(run: Path, log: StepLog) -> list[str]:
    """Compare the training records in `metrics.jsonl` with those of the steps, up to the first one that differs."""
    for record in iterate_records(run, "train"):
        step = log.get(record["step"] - 1)
        if step is None:
            continue
        for name, value in {"loss": step.loss, "lr": step.lr, "grad_norm": step.norm}.items():
            if record.get(name) != _finite(value):
                return [
                    f"{METRICS}: {name} of step {step.step:,} is {record.get(name)}, recorded {_finite(value)}"
                ]
    return []


def _of_environment(files: RunFiles) -> list[str]:
    """Compare code, versions and hardware in `environment.json` with the recorded ones."""
    if not os.path.lexists(files.path / _ENVIRONMENT):
        return []
    try:
        worlds = files.worlds
        record = files.record
    except CheckpointError as error:
        return [f"{_ENVIRONMENT}: {error.slots.get('cause', error.what)}"]
    return [
        f"{_ENVIRONMENT}: the {name} of its worlds is not the recorded one"
        for name, there, recorded in (
            ("environment", environments(worlds), record.environment),
            ("code", distinct(each.get("code", {}) for each in worlds), record.code),
        )
        if there != recorded
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
        # Relative paths were typed in another folder, from which config.yaml has them absolute.
        if now.get(name) != every.get(name) and not is_path(now.get(name))
    ]


def _of_result(record: RunStatement, log: StepLog, result: Mapping[str, Any]) -> list[str]:
    hashes_of_run = ("weights_sha256", "chain", "root")
    found = {name: result.get(name) for name in (*hashes_of_run, "steps")}
    stated: dict[str, Any] = {name: getattr(record, name) for name in hashes_of_run}
    stated["steps"] = record.num_steps
    metrics = result.get("metrics")
    best = result.get("best")
    last = record.evaluations[-1].metrics if record.evaluations else {}
    found |= {
        f"metrics.{name}": _finite(value)
        for name, value in (metrics if isinstance(metrics, dict) else {}).items()
    }
    stated |= {f"metrics.{name}": value for name, value in last.items()}
    if len(log) == record.num_steps:
        found["skipped_steps"], stated["skipped_steps"] = result.get("skipped_steps"), log.skipped()
    lines = [
        f"result.json: {name} is {found.get(name)}, recorded {stated.get(name)}"
        for name in sorted(stated.keys() | found.keys())
        if found.get(name) != stated.get(name)
    ]
    wrong = not_the_best("result.json", best, record.evaluations) if isinstance(best, dict) else ""
    return [*lines, *[wrong] * bool(wrong)]


def _sha256(path: Path) -> str:
    try:
        # A pipe in a stranger's folder would never end.
        return sha256_of_file(path) if path.is_file() else "none"
    except OSError:
        return "none"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What a run folder states about itself, and whether its files agree with each other: everything short of a replay.


@dataclass
class CheckedFiles:
    """A run folder as it describes itself, and what is wrong with it."""

    files: RunFiles  #: The run folder.
    record: RunStatement | None = (
        None  #: What its root stands for; None for a run that is not complete.
    )
    log: StepLog = field(default_factory=StepLog)  #: Its record of steps; empty if there is none.
    checkpoints: list[int] = field(default_factory=list)  #: Steps that a replay can start from.
    #: Files that contradict each other, one line each.
    mismatches: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: What is missing, one line each.

    @property
    def num_steps(self) -> int:
        """Number of steps that the run has done."""
        return self.log.stop if self.record is None else self.record.num_steps

    @property
    def eval_batches(self) -> list[int]:
        """The values of eval_batch that the run states, if it was resumed with another one."""
        environment = [] if self.record is None else self.record.environment
        stated = [each[EVAL_BATCH] for each in environment if EVAL_BATCH in each]
        return [int(each) for each in stated if re.fullmatch("[1-9][0-9]{0,8}", each)]

    @property
    def evaluations(self) -> Evaluations:
        """Step -> metrics, as recorded; of a run that is not complete, the first 500,000 in `metrics.jsonl`."""
        every = (
            islice(self.files.evaluations(), MAX_RECORDS)
            if self.record is None
            else self.record.evaluations
        )
        return {each.step: each.metrics for each in every}


def check_files(files: RunFiles, config: RunConfig | None = None) -> CheckedFiles:
    """Compare the files of a run with each other.

    Args:
        config: Its settings, to compare them with the recorded ones; None: they are not compared.
    """
    found = CheckedFiles(files)
    if files.has_statement:
        try:
            found.record = files.record
        except CheckpointError as error:
            found.mismatches.append(error.line)
    else:
        _note_no_statement(found)
    try:
        found.log = files.log
    except CheckpointError as error:
        found.notes.append(error.what)
    _compare_log(found)
    _compare_checkpoints(found)
    if found.record is not None:
        mismatches, notes = compare_record(files, found.log, config)
        found.mismatches += mismatches
        found.notes += notes
    return found


def _note_no_statement(found: CheckedFiles) -> None:
    # Without this, a publisher who removes the statement could publish any weights. A run writes these files with it.
    for name in ("result.json", WEIGHTS):
        if os.path.lexists(found.files.path / name):
            found.mismatches.append(
                f"provenance.json is missing, and there is {name}, which nothing then states"
            )
            return
    found.notes.append("the run is not complete: it has no provenance.json, hence no root")


def _compare_log(found: CheckedFiles) -> None:
    log = found.log
    chain = "" if found.record is None else found.record.chain
    if len(log) and not log.is_whole:
        found.notes.append(
            f"the record of steps starts at step {log.first_step:,}: earlier steps can't be compared"
        )
    if not chain:
        if len(log) and log.stop < found.num_steps:
            found.notes.append(
                f"the record of steps ends at step {log.stop:,}: later steps can't be compared"
            )
    elif len(log):
        link = log.link().hex()
        if link != chain or log.stop != found.num_steps:
            found.mismatches.append(
                f"steps.bin: its {len(log):,} records end in link {link[:16]}, and provenance.json states "
                f"{chain[:16]} after {found.num_steps:,}"
            )
    elif os.path.lexists(found.files.path / STEPS_FILE):
        found.mismatches.append("steps.bin: damaged, and provenance.json has its last link")
    else:
        found.notes.append(
            "without steps.bin, only weights and metrics are compared, where a segment ends"
        )


def _compare_checkpoints(found: CheckedFiles) -> None:
    """Find the checkpoints that a replay can start from: those in the record, with the files that it names.

    Only manifests and sizes are read. A replay compares the checkpoints that it needs with their manifests.
    """
    present = found.files.checkpoints
    damaged = [
        each
        for each in map(name_of, steps(found.files.path / "checkpoints"))
        if each not in present
    ]
    stated = present if found.record is None else found.record.checkpoints
    for name in damaged:
        if found.record is None or name in stated:
            found.mismatches.append(f"checkpoints/{name}: its manifest.json is missing or damaged")
    for name in present:
        if name not in stated:
            found.mismatches.append(
                f"checkpoints/{name} is not in provenance.json, which lists those of the run"
            )
    for name, parts in stated.items():
        if name in damaged:
            continue
        if name not in present:
            found.notes.append(f"checkpoints/{name} is not published, so no replay can start there")
        elif present[name] != parts:
            for file in (file for file in parts if present[name].get(file) != parts[file]):
                found.mismatches.append(
                    hashes(f"checkpoints/{name}/{file}", present[name].get(file, ""), parts[file])
                )
        else:
            found.checkpoints.append(int(name.removeprefix("step-")))
            _check_sizes(found, name)


def _check_sizes(found: CheckedFiles, name: str) -> None:
    folder = found.files.path / "checkpoints" / name
    for file, expected in manifest_of(folder).items():
        try:
            check_size(folder / file, expected)
        except CheckpointError as error:
            found.mismatches.append(finding(error, found.files.path))
        if not os.path.lexists(folder / file):
            found.mismatches.append(f"checkpoints/{name}/{file} does not exist")


def finding(error: SamebitsError, run: Path) -> str:
    """Return an error about a file of a run as one line, with the file's path in the run folder."""
    text = "; ".join(
        [error.what, *(error.slots[slot] for slot in ("given", "cause") if slot in error.slots)]
    )
    return " ".join(text.replace(f"checkpoint {run}/", "").replace(f"{run}/", "").split())


def compare_monitor(run: Path, monitor: tuple[str, str]) -> list[str]:
    """Compare metric and direction of the best validation, which `best_finding` takes as given, with the recipe's."""
    files = RunFiles(run)
    found = list[str]()
    for name, read in (
        (BEST_FILE, lambda: files.best),
        ("result.json", lambda: files.result.get("best")),
    ):
        with suppress(CheckpointError):  # missing; or damaged, which `best_finding` reports
            best = read()
            stated = (
                f"{best.get('metric')} {best.get('better')}" if isinstance(best, dict) else "none"
            )
            # None: a run that continues from another folder's checkpoint may have validated nothing itself.
            if stated != " ".join(monitor) and (
                isinstance(best, dict)
                or any(monitor[0] in each.metrics for each in files.evaluations())
            ):
                found.append(f"{name}: best is {stated}, in the recipe {' '.join(monitor)}")
    return found
