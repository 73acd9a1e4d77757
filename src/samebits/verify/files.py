"""What a run folder states about itself, and whether its files agree with each other: everything short of a replay."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.config.schema import RunConfig
from samebits.engine.output.publish import evaluations_of, kept_checkpoints
from samebits.errors import CheckpointError, SamebitsError
from samebits.provenance import statement, step_log
from samebits.provenance.stated import BEST_FILE
from samebits.provenance.statement import RunRecord
from samebits.storage.checkpoint import name_of, steps
from samebits.storage.manifest import WEIGHTS, check_size, manifest_of
from samebits.storage.run_folder import RunFolder
from samebits.verify.record_files import compare_record, hashes


@dataclass
class RunFiles:
    """A run folder as it describes itself."""

    path: Path  #: The run folder.
    record: RunRecord | None = None  #: What its root stands for; None for a run that is not complete.
    #: Path in the run folder -> SHA-256 of its content, of the files that its statement names.
    subjects: Mapping[str, str] = field(default_factory=dict)
    log: step_log.StepLog = field(default_factory=step_log.StepLog)  #: Its record of steps; empty if there is none.
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
        every = evaluations_of(RunFolder(self.path)) if self.record is None else self.record.evaluations
        return {each.step: each.metrics for each in every}


def open_run(path: Path, config: RunConfig | None = None) -> RunFiles:
    """Read a run folder and compare its files.

    Args:
        config: Its settings, to compare them with the recorded ones; None: they are not compared.
    """
    files = RunFiles(path)
    # A broken link is damage, and not a file that is missing.
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
        mismatches, notes = compare_record(path, files.record, files.subjects, files.log, config)
        files.mismatches += mismatches
        files.notes += notes
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
                files.mismatches.append(hashes(f"checkpoints/{name}/{file}", present[name].get(file, ""), parts[file]))
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


def compare_monitor(run: Path, monitor: tuple[str, str]) -> list[str]:
    """Compare metric and direction of `best.json`, which `best_finding` takes as they are, with the recipe's."""
    try:
        best = RunFolder(run).read_json(BEST_FILE)
    except CheckpointError:
        return []  # missing, or damaged, which `best_finding` reports
    stated = f"{best.get('metric')} {best.get('better')}"
    return [f"{BEST_FILE}: best is {stated}, in the recipe {' '.join(monitor)}"] * (stated != " ".join(monitor))
