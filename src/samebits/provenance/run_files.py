"""The one reader of a run folder: each file is read at its first use, none is written. Loads no torch and no numpy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from samebits.config import document
from samebits.config.given import flat
from samebits.errors import CheckpointError, ConfigError, SamebitsError
from samebits.plain_file import MAX_MEMORY_BYTES, as_dict, as_list, parse_json, read_part
from samebits.provenance.record import (
    BEST_FILE,
    STATEMENT_FILE,
    STEPS_FILE,
    Evaluation,
    RunStatement,
    StepLog,
    read_statement_and_files,
    read_steps,
)
from samebits.report.records import FILE_NAME as RECORDS
from samebits.report.records import iterate_records
from samebits.storage.manifest import OPTIMIZER, WEIGHTS, manifest_of
from samebits.storage.run_folder import RunFolder

MAX_RECORDS = 500_000  # that a tolerant reader takes
_MAX_CONFIG_BYTES = 4 * 1024 * 1024
_NO_METRICS = ("kind", "step", "epoch")  # of a record in metrics.jsonl
_MAX_VIEW_BYTES = 64 * 1024 * 1024  # of memory for a file, in a view of many runs


class RunFiles:
    """The files of a run, which may be a stranger's.

    A property raises CheckpointError if its file is missing or damaged, `settings` ConfigError.

    Args:
        is_tolerant: Whether a file that is missing or damaged is read as an empty one, for views of many runs.
    """

    def __init__(self, path: Path, *, is_tolerant: bool = False) -> None:
        self.path = path
        self._is_tolerant = is_tolerant
        self._folder = RunFolder(path)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of the folder."""
        try:
            return self._folder.read_json(
                name, _MAX_VIEW_BYTES if self._is_tolerant else MAX_MEMORY_BYTES
            )
        except CheckpointError:
            if self._is_tolerant:
                return {}
            raise

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings in `config.yaml`, by dotted name."""
        try:
            return flat(settings_of(self._folder))
        except (ConfigError, RecursionError):
            if self._is_tolerant:
                return {}
            raise

    @cached_property
    def changed(self) -> list[str]:
        """The names of the settings that differ from the preset, in `config.diff.yaml`; none if it is damaged."""
        path = self.path / "config.diff.yaml"
        try:
            return list(flat(document.read(path, str(path)).values))
        except (SamebitsError, RecursionError):
            return []

    @cached_property
    def result(self) -> dict[str, Any]:
        """What a complete run has reached: `result.json`."""
        return self.read_json("result.json")

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Name, command, versions and hardware of the run's last start: `environment.json`."""
        return self.read_json("environment.json")

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """Yield the records in `metrics.jsonl`, or those of one kind; if tolerant, the first 500,000 of them."""
        try:
            yield from itertools.islice(
                iterate_records(self.path, kind), MAX_RECORDS if self._is_tolerant else None
            )
        except CheckpointError:
            if not self._is_tolerant:
                raise

    def last_records(self, num_bytes: int) -> dict[str, dict[str, Any]]:
        """Return the last record of each kind within the end of `metrics.jsonl`, so many bytes, by kind."""
        last: dict[str, dict[str, Any]] = {}
        # The last line may be half written, and the first one is cut off.
        for line in read_part(self.path / RECORDS, num_bytes, is_end=True).split(b"\n")[:-1]:
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                last[record["kind"]] = record
        return last

    @cached_property
    def best(self) -> dict[str, Any]:
        """Step, metric and value of the best validation: `best.json`."""
        best = self.read_json(BEST_FILE)
        if not (isinstance(best.get("metric"), str) and isinstance(best.get("value"), int | float)):
            path = self.path / BEST_FILE
            raise CheckpointError(
                f"{path} was altered",
                cause="it has no metric with a value",
                fix="Restore the file.",
            )
        return best

    @cached_property
    def worlds(self) -> list[dict[str, Any]]:
        """The worlds of the run, with code and environment of each, in `environment.json`."""
        worlds = as_list(self.environment.get("worlds"))
        return [each for each in worlds if isinstance(each, dict)]

    @property
    def has_statement(self) -> bool:
        """Whether there is a statement, or something that is none in its place."""
        # A broken link is damage, and not a file that is missing.
        return os.path.lexists(self.path / STATEMENT_FILE)

    @cached_property
    def _stated(self) -> tuple[RunStatement, dict[str, str]]:
        return read_statement_and_files(self.path / STATEMENT_FILE)

    @property
    def record(self) -> RunStatement:
        """What the root of a complete run stands for, in `provenance.json`."""
        return self._stated[0]

    @property
    def subjects(self) -> dict[str, str]:
        """Path in the run folder -> SHA-256 of its content, of the files that the statement names."""
        return self._stated[1]

    @cached_property
    def log(self) -> StepLog:
        """The record of steps in `steps.bin`."""
        return read_steps(self.path / STEPS_FILE)

    def evaluations(self) -> Iterator[Evaluation]:
        """Yield step and metrics of each evaluation in `metrics.jsonl`. Not kept: a stranger's may be millions."""
        for record in self.records("eval"):
            metrics = {name: record[name] for name in record if name not in _NO_METRICS}
            yield Evaluation.of(record["step"], metrics)

    @cached_property
    def checkpoints(self) -> dict[str, dict[str, str]]:
        """The SHA-256 of weights and optimizer state of each checkpoint, by its name, from its manifest."""
        from samebits.storage.checkpoint import name_of, steps  # late, because of torch

        found = {}
        for name in map(name_of, steps(self._folder.checkpoints)):
            try:
                manifest = manifest_of(self._folder.checkpoints / name)
            except CheckpointError:
                continue  # damaged: no run can start there
            found[name] = {part: str(manifest[part].get("sha256")) for part in (WEIGHTS, OPTIMIZER)}
        return found


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """Read a run folder's `config.yaml`. Raises ConfigError if it is damaged."""
    try:
        return document.read(folder.config, str(folder.config), _MAX_CONFIG_BYTES).values
    except ConfigError as error:
        fix = f"Restore {folder.config}, or move it away: checkpoints have the settings too."
        raise error.with_slots(fix=fix) from None


def over_worlds(worlds: Iterable[object]) -> dict[str, str]:
    """Join the values that a run's worlds have by name: it may have continued with other code or on another machine."""
    values: dict[str, list[str]] = {}
    for world in worlds:
        for name, value in as_dict(world).items():
            seen = values.setdefault(str(name), [])
            if str(value) not in seen:
                seen.append(str(value))
    return {name: ", then ".join(seen) for name, seen in values.items()}
