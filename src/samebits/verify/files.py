"""What a run folder states about itself, and whether its files agree with each other: everything short of a replay."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig
from samebits.engine.output.publish import evaluations_of, kept_checkpoints
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance import statement, step_log
from samebits.provenance.same_run import result_settings
from samebits.provenance.statement import RunRecord
from samebits.report.records import FILE_NAME as METRICS
from samebits.storage.checkpoint import BEST, name_of, steps
from samebits.storage.manifest import WEIGHTS, check_size, manifest_of, sha256_of_file
from samebits.storage.run_folder import RunFolder

BEST_FILE = f"checkpoints/{BEST}"


@dataclass
class RunFiles:
    """A run folder as it describes itself.

    Attributes:
        path: The run folder.
        record: What its root stands for; None for a run that is not complete.
        subjects: Path in the run folder -> SHA-256 of its content, of the files that its statement names.
        log: Its record of steps; empty if there is none.
        checkpoints: Steps that a replay can start from.
        mismatches: Files that contradict each other, one line each.
        notes: What is missing, one line each.
    """

    path: Path
    record: RunRecord | None = None
    subjects: Mapping[str, str] = field(default_factory=dict)
    log: step_log.StepLog = field(default_factory=step_log.StepLog)
    checkpoints: list[int] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Number of steps that the run has done."""
        return self.log.stop if self.record is None else self.record.num_steps

    @property
    def evaluations(self) -> dict[int, Mapping[str, Any]]:
        """Step -> metrics, as recorded."""
        every = evaluations_of(RunFolder(self.path)) if self.record is None else self.record.evaluations
        return {each.step: each.metrics for each in every}


def open_run(path: Path, config: RunConfig | None = None) -> RunFiles:
    """Read a run folder and compare its files.

    Args:
        path: The run folder.
        config: Its settings, to compare them with the recorded ones; None: they are not compared.
    """
    files = RunFiles(path)
    if os.path.lexists(path / statement.FILE_NAME):
        try:
            files.record, files.subjects = statement.read_statement_and_files(path / statement.FILE_NAME)
        except CheckpointError as error:
            files.mismatches.append(error.line)
    else:
        _note_no_statement(files)
    try:
        files.log = step_log.read_steps(path / step_log.FILE_NAME)
    except CheckpointError as error:
        files.notes.append(error.what)
    _compare_log(files)
    _compare_checkpoints(files)
    if files.record is not None:
        _compare_record(files, files.record, config)
    return files


def _note_no_statement(files: RunFiles) -> None:
    # Without this, a publisher who removes the statement could publish any weights. A run writes these files with it.
    for name in ("result.json", WEIGHTS):
        if os.path.lexists(files.path / name):
            files.mismatches.append(f"provenance.json is missing, and there is {name}, which nothing then states")
            return
    files.notes.append("the run is not complete: it has no provenance.json, hence no root")


def _compare_log(files: RunFiles) -> None:
    log, chain = files.log, "" if files.record is None else files.record.chain
    if len(log) and not log.is_whole:
        files.notes.append(f"the record of steps starts at step {log.first_step:,}: earlier steps can't be compared")
    if not chain and len(log) and log.stop < files.num_steps:
        files.notes.append(f"the record of steps ends at step {log.stop:,}: later steps can't be compared")
    link = log.link().hex() if chain and len(log) else chain  # hashed once: a log may have millions of records
    if chain and len(log) and (link != chain or log.stop != files.num_steps):
        files.mismatches.append(
            f"steps.bin: its {len(log):,} records end in link {link[:16]}, and provenance.json states "
            f"{chain[:16]} after {files.num_steps:,}"
        )
    elif chain and not len(log) and os.path.lexists(files.path / step_log.FILE_NAME):
        files.mismatches.append("steps.bin: damaged, and provenance.json has its last link")
    elif chain and not len(log):
        files.notes.append("without steps.bin, only weights and metrics are compared, where a segment ends")


def _compare_checkpoints(files: RunFiles) -> None:
    """Find the checkpoints that a replay can start from: those in the record, with the files that it names.

    Only manifests and sizes are read. A replay compares the checkpoints that it needs with their manifests.
    """
    folder = RunFolder(files.path)
    present = kept_checkpoints(folder)
    damaged = [name for name in map(name_of, steps(folder.checkpoints)) if name not in present]
    stated = present if files.record is None else files.record.checkpoints
    for name in damaged:
        if files.record is None or name in stated:
            files.mismatches.append(f"checkpoints/{name}: its manifest.json is missing or damaged")
    for name in present:
        if name not in stated:
            files.mismatches.append(f"checkpoints/{name} is not in provenance.json, which lists those of the run")
    for name, parts in stated.items():
        if name in damaged:
            continue
        if name not in present:
            files.notes.append(f"checkpoints/{name} is not published, so no replay can start there")
        elif present[name] != parts:
            for file in (file for file in parts if present[name].get(file) != parts[file]):
                files.mismatches.append(_hashes(f"checkpoints/{name}/{file}", present[name].get(file, ""), parts[file]))
        else:
            files.checkpoints.append(int(name.removeprefix("step-")))
            _check_sizes(files, name)


def _check_sizes(files: RunFiles, name: str) -> None:
    folder = files.path / "checkpoints" / name
    for file, expected in manifest_of(folder).items():
        try:
            check_size(folder / file, expected)
        except CheckpointError as error:
            files.mismatches.append(finding(error, files.path))
        if not os.path.lexists(folder / file):
            files.mismatches.append(f"checkpoints/{name}/{file} does not exist")


def finding(error: SamebitsError, run: Path) -> str:
    """Return an error about a file of a run as one line, with the file's path in the run folder."""
    text = "; ".join([error.what, *(error.slots[slot] for slot in ("given", "cause") if slot in error.slots)])
    return " ".join(text.replace(f"checkpoint {run}/", "").replace(f"{run}/", "").split())


def _hashes(name: str, found: str, recorded: str) -> str:
    return f"{name} has sha256 {found[:16]}, recorded {recorded[:16]}"


def _compare_record(files: RunFiles, record: RunRecord, config: RunConfig | None) -> None:
    """Compare the other files of a complete run with its record."""
    folder = RunFolder(files.path)
    now = {} if config is None else result_settings(config)
    for name in sorted(record.settings.keys() | now.keys() if now else ()):
        before, value = record.settings.get(name), _plain(now.get(name))
        if before != value:
            files.mismatches.append(f"config.yaml: {name} is {value}, recorded {before}")
    at = [each.step for each in record.evaluations]
    if at != sorted(set(at)) or not at or at[-1] != record.num_steps:
        files.mismatches.append(f"provenance.json: its evaluations do not end after step {record.num_steps:,}")
    try:
        _compare_result(files, record, folder.read_json("result.json"))
    except CheckpointError as error:
        files.notes.append(error.what)
    _compare_best(files, record)
    if not os.path.lexists(files.path / METRICS):
        files.notes.append(f"{METRICS} is not published")
    else:
        _compare_evaluations(files, record)
    for name, sha256 in files.subjects.items():
        checkpoint, _, file = name.removeprefix("checkpoints/").partition("/")
        if name in (WEIGHTS, step_log.FILE_NAME):
            if not os.path.lexists(files.path / name):
                files.mismatches.append(f"{name} is missing, and provenance.json states its sha256 {sha256[:16]}")
                continue
            found = _sha256(files.path / name)
        else:
            found = record.checkpoints.get(checkpoint, {}).get(file, "none")
        if found != sha256:
            files.mismatches.append(_hashes(name, found, sha256))


def _compare_best(files: RunFiles, record: RunRecord) -> None:
    """Compare `best.json`, which names the checkpoint that `--checkpoint best` takes, with the recorded evaluations."""
    if not os.path.lexists(files.path / BEST_FILE):
        return
    try:
        best = RunFolder(files.path).read_json(BEST_FILE)
    except CheckpointError as error:
        files.mismatches.append(finding(error, files.path))
        return
    name, value = str(best.get("metric")), best.get("value")
    values = {each.step: each.metrics.get(name) for each in record.evaluations}
    known = [each for each in values.values() if each is not None]
    is_best = known and value == (max(known) if best.get("better") == "max" else min(known))
    if not is_best or value not in [each for step, each in values.items() if step == best.get("step")]:
        files.mismatches.append(
            f"{BEST_FILE}: {name} {value} after step {best.get('step')} is not the best of the recorded evaluations"
        )


def compare_monitor(run: Path, monitor: tuple[str, str]) -> list[str]:
    """Compare the metric and direction of `best.json`, which are only taken as they are above, with the recipe's."""
    try:
        best = RunFolder(run).read_json(BEST_FILE)
    except CheckpointError:
        return []  # missing, or damaged, which `open_run` reports
    stated = f"{best.get('metric')} {best.get('better')}"
    return [f"{BEST_FILE}: best is {stated}, in the recipe {' '.join(monitor)}"] * (stated != " ".join(monitor))


def _compare_evaluations(files: RunFiles, record: RunRecord) -> None:
    """Compare `metrics.jsonl` with the recorded evaluations, up to the first one that differs."""
    recorded = {each.step: each.metrics for each in record.evaluations}
    for each in evaluations_of(RunFolder(files.path)):
        before = recorded.get(each.step)
        if each in record.evaluations:
            continue
        if before is None:
            files.mismatches.append(f"{METRICS}: it has an evaluation after step {each.step:,}, which is not recorded")
            return
        names = [name for name in sorted({**each.metrics, **before}) if each.metrics.get(name) != before.get(name)]
        for name in names[:1]:
            values = f"{each.metrics.get(name)}, recorded {before.get(name)}"
            files.mismatches.append(f"{METRICS}: {name} after step {each.step:,} is {values}")
        return


def _compare_result(files: RunFiles, record: RunRecord, result: Mapping[str, Any]) -> None:
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
    if len(files.log) == record.num_steps:
        found["skipped_steps"], stated["skipped_steps"] = result.get("skipped_steps"), files.log.skipped()
    for name in sorted(stated.keys() | found.keys()):
        if found.get(name) != stated.get(name):
            files.mismatches.append(f"result.json: {name} is {found.get(name)}, recorded {stated.get(name)}")


def _sha256(path: Path) -> str:
    try:
        return sha256_of_file(path) if path.is_file() else "none"
    except OSError:
        return "none"


def _plain(value: Any) -> Any:
    # JSON turns tuples into lists, as in the recorded settings.
    return json.loads(json.dumps(value))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
