"""The one reader of a run folder: each file is read at its first use, none is written. Loads no torch and no numpy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.config.given import flat
from samebits.errors import CheckpointError
from samebits.provenance import statement
from samebits.provenance.same_run import settings_of
from samebits.provenance.statement import Evaluation, RunRecord
from samebits.report.records import read_records
from samebits.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from samebits.provenance.step_log import StepLog

_NO_METRICS = ("kind", "step", "epoch")  # of a record in metrics.jsonl


class RunFiles:
    """The files of a run, which may be a stranger's.

    A property raises CheckpointError if its file is missing or damaged, `settings` ConfigError.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, RunFolder(path)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in `config.yaml`, by dotted name."""
        return flat(settings_of(self._folder))

    @cached_property
    def result(self) -> dict[str, Any]:
        """What a complete run has reached: `result.json`."""
        return self._folder.read_json("result.json")

    @cached_property
    def best(self) -> dict[str, Any]:
        """Step, metric and value of the best validation: `best.json`."""
        return self._folder.read_json(statement.BEST_FILE)

    @cached_property
    def worlds(self) -> list[dict[str, Any]]:
        """The worlds of the run, with code and environment of each, in `environment.json`."""
        worlds = self._folder.read_json("environment.json").get("worlds")
        return [each for each in worlds if isinstance(each, dict)] if isinstance(worlds, list) else []

    @property
    def has_statement(self) -> bool:
        """Whether there is a statement, or something that is none in its place."""
        # A broken link is damage, and not a file that is missing.
        return os.path.lexists(self.path / statement.FILE_NAME)

    @cached_property
    def _stated(self) -> tuple[RunRecord, dict[str, str]]:
        return statement.read_statement_and_files(self.path / statement.FILE_NAME)

    @property
    def record(self) -> RunRecord:
        """What the root of a complete run stands for, in `provenance.json`."""
        return self._stated[0]

    @property
    def subjects(self) -> dict[str, str]:
        """Path in the run folder -> SHA-256 of its content, of the files that the statement names."""
        return self._stated[1]

    @cached_property
    def log(self) -> StepLog:
        """The record of steps in `steps.bin`."""
        from samebits.provenance.step_log import FILE_NAME, read_steps  # late, because of numpy

        return read_steps(self.path / FILE_NAME)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Step and metrics of each evaluation in `metrics.jsonl`."""
        return [
            Evaluation.of(record["step"], {name: record[name] for name in record if name not in _NO_METRICS})
            for record in read_records(self.path, "eval")
        ]

    @cached_property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """The SHA-256 of weights and optimizer state of each checkpoint, by its name, from its manifest."""
        from samebits.storage.checkpoint import name_of, steps  # late, because of torch
        from samebits.storage.manifest import OPTIMIZER, WEIGHTS, manifest_of

        found = {}
        for name in map(name_of, steps(self._folder.checkpoints)):
            try:
                manifest = manifest_of(self._folder.checkpoints / name)
            except CheckpointError:
                continue  # damaged: no run can start there
            found[name] = {part: str(manifest[part].get("sha256")) for part in (WEIGHTS, OPTIMIZER)}
        return found


def over_worlds(worlds: Iterable[object]) -> dict[str, str]:
    """Join the values that a run's worlds have by name: it may have continued with other code or on another machine."""
    values: dict[str, list[str]] = {}
    for world in worlds:
        for name, value in world.items() if isinstance(world, dict) else ():
            seen = values.setdefault(str(name), [])
            if str(value) not in seen:
                seen.append(str(value))
    return {name: ", then ".join(seen) for name, seen in values.items()}
