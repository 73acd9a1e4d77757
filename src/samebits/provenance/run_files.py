"""The one reader of a run folder, and what its statement states about the other files. Loads no torch and no numpy."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.config import document
from samebits.config.given import flat
from samebits.config.load import without_removed
from samebits.errors import CheckpointError, ConfigError, SamebitsError
from samebits.plain_file import MAX_MEMORY_BYTES, parse_json, read_part
from samebits.provenance import statement
from samebits.provenance.same_run import settings_of
from samebits.provenance.statement import BEST_FILE, FILE_NAME, Evaluation, RunStatement
from samebits.report.records import FILE_NAME as RECORDS
from samebits.report.records import iterate_records
from samebits.storage.manifest import WEIGHTS, manifest_of
from samebits.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from samebits.provenance.step_log import StepLog


# The one reader of a run folder: each file is read at its first use, none is written. Loads no torch and no numpy.


MAX_RECORDS = 500_000  # that a tolerant reader takes
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
        best = self.read_json(statement.BEST_FILE)
        if not (isinstance(best.get("metric"), str) and isinstance(best.get("value"), int | float)):
            path = self.path / statement.BEST_FILE
            raise CheckpointError(
                f"{path} was altered",
                cause="it has no metric with a value",
                fix="Restore the file.",
            )
        return best

    @cached_property
    def worlds(self) -> list[dict[str, Any]]:
        """The worlds of the run, with code and environment of each, in `environment.json`."""
        worlds = self.environment.get("worlds")
        return (
            [each for each in worlds if isinstance(each, dict)] if isinstance(worlds, list) else []
        )

    @property
    def has_statement(self) -> bool:
        """Whether there is a statement, or something that is none in its place."""
        # A broken link is damage, and not a file that is missing.
        return os.path.lexists(self.path / statement.FILE_NAME)

    @cached_property
    def _stated(self) -> tuple[RunStatement, dict[str, str]]:
        return statement.read_statement_and_files(self.path / statement.FILE_NAME)

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
        from samebits.provenance.step_log import FILE_NAME, read_steps  # late, because of numpy

        return read_steps(self.path / FILE_NAME)

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Step and metrics of each evaluation in `metrics.jsonl`."""
        return [
            Evaluation.of(
                record["step"], {name: record[name] for name in record if name not in _NO_METRICS}
            )
            for record in self.records("eval")
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


# What the statement of a complete run, `provenance.json`, states about the other files in its folder.


def check_stated(run: Path, weights: Path, which: str) -> None:
    """Check that the weights that a command has read are those of the run's statement.

    The hashes in `result.json` and in a manifest show damage. A publisher who replaces weights can replace those hashes
    too, but not the root, which covers the statement.

    Args:
        run: The run folder. Without a statement, as in a run that is not complete, nothing is checked.
        weights: The file or checkpoint folder that was read, whose content is that of `result.json` or its manifest.
    """
    files = RunFiles(run)
    if not files.has_statement:
        return
    record = files.record
    if weights.name == WEIGHTS:
        found = files.result.get("weights_sha256")
        stated = record.weights_sha256
        if found != stated:
            raise _not_stated(run, weights, f"sha256 {found}", f"sha256 {stated}")
        return
    parts = record.checkpoints.get(weights.name)
    if parts is None:
        raise _not_stated(
            run, weights / WEIGHTS, weights.name, ", ".join(record.checkpoints) or "no checkpoint"
        )
    manifest = manifest_of(weights)
    for name, stated in parts.items():
        if (found := str(manifest.get(name, {}).get("sha256"))) != stated:
            raise _not_stated(run, weights / name, f"sha256 {found}", f"sha256 {stated}")
    if which == "best" and (text := best_finding(files)):
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


def best_finding(files: RunFiles) -> str:
    """Compare `best.json`, which `--checkpoint best` takes, with the recorded evaluations; return what contradicts
    them.
    """
    if not os.path.lexists(files.path / BEST_FILE):
        return ""
    evaluations = files.record.evaluations
    try:
        return not_the_best(BEST_FILE, files.best, evaluations)
    except CheckpointError as error:
        return f"{BEST_FILE}: {error.slots.get('cause', error.what)}"


def not_the_best(file: str, best: Mapping[str, Any], evaluations: Sequence[Evaluation]) -> str:
    """Return how the best validation that a file states contradicts the recorded evaluations; empty if it does not."""
    name = str(best.get("metric"))
    step = best.get("step")
    value = best.get("value")
    values = {each.step: each.metrics.get(name) for each in evaluations}
    known = [each for each in values.values() if each is not None]
    is_best = known and value == (max(known) if best.get("better") == "max" else min(known))
    if is_best and value in [each for at, each in values.items() if at == step]:
        return ""
    return f"{file}: {name} {value} after step {step} is not the best of the recorded evaluations"


# Settings that contradict a run's statement. Loads no torch: `samebits compare` only reads.


def altered_settings(files: RunFiles, now: dict[str, Any] | None = None) -> list[str]:
    """Return a line such as "config.yaml: seed is 1, recorded 0" for each setting that is not the statement's.

    Args:
        now: The settings that determine the result, as the recipe resolves them, by dotted name; None: those in
            `config.yaml`, which has all of them, so that no recipe is imported.
    """
    recorded = files.record.settings
    if now is None:
        try:
            values = files.settings
        except ConfigError as error:
            return [f"config.yaml: {error.what}"]
        now = {name: values[name] for name in recorded if name in values}
        now["recipe"] = Path(str(values.get("recipe"))).name
    # Lists for tuples, as in the statement. It may be of a version with settings that were removed since.
    found = without_removed(json.loads(json.dumps(now, default=str)))
    recorded = without_removed(recorded)
    return [
        f"config.yaml: {name} is {found.get(name)}, recorded {recorded.get(name)}"
        for name in sorted(recorded.keys() | found.keys())
        if found.get(name) != recorded.get(name)
    ]


def altered_in(run: Path) -> list[str]:
    """Compare `config.yaml` with the statement, as `altered_settings` does; nothing if there is no statement."""
    files = RunFiles(run)
    try:
        return altered_settings(files) if files.has_statement else []
    except CheckpointError as error:
        return [error.line]
