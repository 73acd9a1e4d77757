"""What a run folder states about itself, and whether its files agree with each other: everything short of a replay."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance.run_files import RunFiles
from samebits.provenance.statement import BEST_FILE, RunRecord
from samebits.provenance.step_log import FILE_NAME as STEPS
from samebits.provenance.step_log import StepLog
from samebits.storage.checkpoint import name_of, steps
from samebits.storage.manifest import WEIGHTS, check_size, manifest_of
from samebits.verify.record_files import compare_record, hashes


@dataclass
class CheckedFiles:
    """A run folder as it describes itself, and what is wrong with it."""

    files: RunFiles  #: The run folder.
    record: RunRecord | None = None  #: What its root stands for; None for a run that is not complete.
    log: StepLog = field(default_factory=StepLog)  #: Its record of steps; empty if there is none.
    checkpoints: list[int] = field(default_factory=list)  #: Steps that a replay can start from.
    mismatches: list[str] = field(default_factory=list)  #: Files that contradict each other, one line each.
    notes: list[str] = field(default_factory=list)  #: What is missing, one line each.

    @property
    def num_steps(self) -> int:
        """Number of steps that the run has done."""
        return self.log.stop if self.record is None else self.record.num_steps

    @property
    def evaluations(self) -> dict[int, Mapping[str, Any]]:
        """Step -> metrics, as recorded."""
        every = self.files.evaluations if self.record is None else self.record.evaluations
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
            found.mismatches.append(f"provenance.json is missing, and there is {name}, which nothing then states")
            return
    found.notes.append("the run is not complete: it has no provenance.json, hence no root")


def _compare_log(found: CheckedFiles) -> None:
    log, chain = found.log, "" if found.record is None else found.record.chain
    if len(log) and not log.is_whole:
        found.notes.append(f"the record of steps starts at step {log.first_step:,}: earlier steps can't be compared")
    if not chain and len(log) and log.stop < found.num_steps:
        found.notes.append(f"the record of steps ends at step {log.stop:,}: later steps can't be compared")
    link = log.link().hex() if chain and len(log) else chain  # hashed once: a log may have millions of records
    if chain and len(log) and (link != chain or log.stop != found.num_steps):
        found.mismatches.append(
            f"steps.bin: its {len(log):,} records end in link {link[:16]}, and provenance.json states "
            f"{chain[:16]} after {found.num_steps:,}"
        )
    elif chain and not len(log) and os.path.lexists(found.files.path / STEPS):
        found.mismatches.append("steps.bin: damaged, and provenance.json has its last link")
    elif chain and not len(log):
        found.notes.append("without steps.bin, only weights and metrics are compared, where a segment ends")


def _compare_checkpoints(found: CheckedFiles) -> None:
    """Find the checkpoints that a replay can start from: those in the record, with the files that it names.

    Only manifests and sizes are read. A replay compares the checkpoints that it needs with their manifests.
    """
    present = found.files.checkpoints
    damaged = [each for each in map(name_of, steps(found.files.path / "checkpoints")) if each not in present]
    stated = present if found.record is None else found.record.checkpoints
    for name in damaged:
        if found.record is None or name in stated:
            found.mismatches.append(f"checkpoints/{name}: its manifest.json is missing or damaged")
    for name in present:
        if name not in stated:
            found.mismatches.append(f"checkpoints/{name} is not in provenance.json, which lists those of the run")
    for name, parts in stated.items():
        if name in damaged:
            continue
        if name not in present:
            found.notes.append(f"checkpoints/{name} is not published, so no replay can start there")
        elif present[name] != parts:
            for file in (file for file in parts if present[name].get(file) != parts[file]):
                found.mismatches.append(hashes(f"checkpoints/{name}/{file}", present[name].get(file, ""), parts[file]))
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
    text = "; ".join([error.what, *(error.slots[slot] for slot in ("given", "cause") if slot in error.slots)])
    return " ".join(text.replace(f"checkpoint {run}/", "").replace(f"{run}/", "").split())


def compare_monitor(run: Path, monitor: tuple[str, str]) -> list[str]:
    """Compare metric and direction of `best.json`, which `best_finding` takes as they are, with the recipe's."""
    try:
        best = RunFiles(run).best
    except CheckpointError:
        return []  # missing, or damaged, which `best_finding` reports
    stated = f"{best.get('metric')} {best.get('better')}"
    return [f"{BEST_FILE}: best is {stated}, in the recipe {' '.join(monitor)}"] * (stated != " ".join(monitor))
