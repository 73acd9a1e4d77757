"""Comparison of two run folders by their files alone: no code of either run is executed.

config.yaml                       settings, those that determine the result and the others
provenance.json, or if it is      code, data and versions
  missing environment.json
steps.bin                         the first step whose record differs, and its first field
metrics.jsonl, checkpoints        evaluations and states, where both runs have one of the same step
"""

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from samebits.errors import CheckpointError
from samebits.plain_file import read_plain
from samebits.provenance.fingerprint import Fingerprint, Named
from samebits.provenance.identity import is_free
from samebits.provenance.record import StepLog
from samebits.provenance.run_files import RunFiles, over_worlds
from samebits.replay.compare import Change, changed_fields, changes
from samebits.replay.record_files import Evaluations, check_files
from samebits.storage.checkpoint import name_of, steps
from samebits.storage.manifest import read_state
from samebits.storage.run_folder import COPY, recipe_change

_MAX_RECIPE_BYTES = 16 * 1024 * 1024
_SHOWN_CHARS = 60  # of a line of a recipe


@dataclass(frozen=True)
class StepDifference:
    """The first step whose record differs."""

    step: int  #: The step, from 0.
    fields: list[Change]  #: The fields that differ, in the order in which a step computes them.


@dataclass
class RecordedRun:
    """What a run folder states about a run."""

    path: Path  #: The run folder.
    settings: dict[str, Any]  #: All settings, by dotted name.
    code: Named = field(default_factory=dict)  #: Digests of the code, by name.
    data: Named = field(default_factory=dict)  #: Digests of the data, by name.
    versions: Named = field(default_factory=dict)  #: Versions and hardware, by name.
    #: The record of its steps; empty if there is none.
    log: StepLog = field(default_factory=StepLog)
    evaluations: Evaluations = field(default_factory=dict)  #: Step -> metrics.
    #: Step -> SHA-256 of weights and optimizer state, by file.
    checkpoints: dict[int, dict[str, str]] = field(default_factory=dict)
    num_steps: int = 0  #: Number of steps done.
    weights_sha256: str = ""  #: Hash of the final weights; empty if the run is not complete.
    #: Files of the run that contradict each other, one line each.
    contradictions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  #: What is missing, one line each.


def read_run(path: Path) -> RecordedRun:
    """Read what a run folder states about a run.

    Raises:
        ConfigError: It is not a run folder, or its settings are damaged.
    """
    files = RunFiles(path)
    found = RecordedRun(path, files.settings)
    try:
        record = files.record
        found.code = over_worlds(record.code)
        found.versions = over_worlds(record.environment)
        found.data = {**record.data, "dataset info": record.dataset_info_sha256[:16]}
        found.num_steps = record.num_steps
        found.weights_sha256 = record.weights_sha256
    except CheckpointError as error:
        found.notes.append(error.what)
        _read_incomplete(found, files)
    try:
        found.log = files.log
    except CheckpointError as error:
        found.notes.append(error.what)
    found.num_steps = found.num_steps or found.log.stop
    if (change := recipe_change(path, str(found.settings.get("recipe")))) is not None:
        found.notes.append(change.partition("\n")[0].removeprefix("warning: "))
    checked = check_files(files)
    found.evaluations = checked.evaluations
    found.contradictions = checked.mismatches
    found.checkpoints = {
        int(name.removeprefix("step-")): parts for name, parts in files.checkpoints.items()
    }
    return found


def _read_incomplete(found: RecordedRun, files: RunFiles) -> None:
    """Read code, data and versions of a run without a statement, as far as its files have them."""
    with suppress(CheckpointError):
        found.code = over_worlds(world.get("code") for world in files.worlds)
        found.versions = over_worlds(world.get("environment") for world in files.worlds)
    for step in reversed(steps(found.path / "checkpoints")):
        with suppress(CheckpointError):
            state = read_state(found.path / "checkpoints" / name_of(step)).get("state")
            found.data = Fingerprint.from_json(
                state.get("fingerprint") if isinstance(state, dict) else None
            ).data
            return


@dataclass
class FolderDifference:
    """The differences between two run folders."""

    settings: list[Change]  #: Settings that determine the result.
    free_settings: list[Change]  #: Settings that do not.
    code: list[Change]  #: Digests of code; for recipe files, the first line that differs.
    data: list[Change]  #: Digests of data.
    versions: list[Change]  #: Versions and hardware.
    step: StepDifference | None  #: The first step whose record differs; None if there is none.
    num_compared: int  #: Number of steps whose records were compared.
    num_steps: tuple[int, int]  #: Number of steps of each run.
    evaluations: list[Change]  #: Metrics that differ.
    #: The first step at which both runs have a checkpoint, and these differ; None if there is none.
    checkpoint: int | None
    weights: bool | None  #: Whether the final weights differ; None if a run is not complete.
    altered: list[str]  #: Files that contradict the record of their own run, one line each.
    notes: list[str]  #: What could not be compared, one line each.

    @property
    def is_equal(self) -> bool:
        """Whether both runs did the same training (steps, evaluations, states, weights) and no file was altered."""
        is_other = (
            self.num_steps[0] != self.num_steps[1] or self.checkpoint is not None or self.weights
        )
        return not (self.step or self.evaluations or is_other or self.altered)


def compare_folders(a: RecordedRun, b: RecordedRun) -> FolderDifference:
    """Compare two run folders. If one run is longer, the common part is compared."""
    runs = (("a", a), ("b", b))
    settings = changes(a.settings, b.settings)
    recipe = [each for each in settings if each.name == "recipe"]
    num_compared, step = first_difference(a.log, b.log)
    common = sorted(a.checkpoints.keys() & b.checkpoints.keys())
    is_complete = bool(a.weights_sha256 and b.weights_sha256) and a.num_steps == b.num_steps
    return FolderDifference(
        settings=[each for each in settings if not is_free(each.name) and each.name != "recipe"],
        free_settings=[each for each in settings if is_free(each.name)],
        code=[*_lines(a.path, b.path), *changes(a.code, b.code), *recipe],
        data=changes(a.data, b.data),
        versions=changes(a.versions, b.versions),
        step=step,
        num_compared=num_compared,
        num_steps=(a.num_steps, b.num_steps),
        evaluations=[
            Change(f"{change.name} after step {step:,}", change.a, change.b)
            for step in sorted(a.evaluations.keys() & b.evaluations.keys())
            for change in changes(a.evaluations[step], b.evaluations[step])
        ],
        checkpoint=next(
            (step for step in common if a.checkpoints[step] != b.checkpoints[step]), None
        ),
        weights=a.weights_sha256 != b.weights_sha256 if is_complete else None,
        altered=[f"{name}: {text}" for name, run in runs for text in run.contradictions],
        notes=[f"{name}: {note}" for name, run in runs for note in run.notes],
    )


def first_difference(a: StepLog, b: StepLog) -> tuple[int, StepDifference | None]:
    """Return the number of steps that both logs have, and the first whose record differs.

    All records are compared at once: a log of a million steps takes milliseconds, so that bisection over the links of
    the chains would save nothing.
    """
    start = max(a.first_step, b.first_step)
    stop = min(a.stop, b.stop)
    if stop <= start:
        return 0, None
    rows = [
        np.frombuffer(log.body, np.uint8).reshape(len(log), -1)[
            start - log.first_step : stop - log.first_step
        ]
        for log in (a, b)
    ]
    unequal = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    if not len(unequal):
        return stop - start, None
    step = start + int(unequal[0])
    before = a.get(step)
    after = b.get(step)
    assert after is not None
    return stop - start, StepDifference(step, changed_fields(before, after))


def _lines(a: Path, b: Path) -> list[Change]:
    """Return the first line in which the runs' copies of a recipe file differ. The copies are only read."""
    texts = []
    for path in (a, b):
        try:
            texts.append(
                read_plain(path / COPY, _MAX_RECIPE_BYTES).decode(errors="replace").splitlines()
            )
        except OSError:
            return []
    for number, texts_of_line in enumerate(zip_longest(*texts, fillvalue=""), start=1):
        one, other = map(str.strip, texts_of_line)
        if one != other:
            return [Change(f"{COPY}, line {number}", one[:_SHOWN_CHARS], other[:_SHOWN_CHARS])]
    return []
