"""The provenance of a complete run: `provenance.json`, from the run's records and files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lockstep.engine.job import Job
from lockstep.engine.run_spec import RunSpec
from lockstep.errors import CheckpointError
from lockstep.provenance import step_log
from lockstep.provenance.run_identity import FACTS
from lockstep.provenance.statement import FILE_NAME, make_record, make_statement, sha256_of_json
from lockstep.report.records import read_records
from lockstep.storage.checkpoint import name_of, steps
from lockstep.storage.manifest import OPTIMIZER, WEIGHTS, manifest_of, sha256_of_file
from lockstep.storage.run_folder import RunFolder


def write_provenance(spec: RunSpec, job: Job, folder: RunFolder, weights_sha256: str) -> str:
    """Write `provenance.json` into the folder of a complete run. Called on rank 0.

    Args:
        spec: The specification of the run.
        job: The run.
        folder: Its folder, with the final weights.
        weights_sha256: Hash of the final weights.

    Returns:
        The root: the SHA-256 of the run's record.

    Raises:
        CheckpointError: The file cannot be written.
    """
    checkpoints = kept_checkpoints(folder)
    record = make_record(
        config=job.config,
        chain=job.progress.chain,
        num_steps=job.num_steps,
        worlds=job.progress.worlds,
        data=job.fingerprint.data,
        dataset_info_sha256=str(job.identity.get(FACTS, "")),
        evaluations=evaluations_of(folder),
        checkpoints=checkpoints,
        weights_sha256=weights_sha256,
    )
    present = [path for path in (folder.weights, folder.path / step_log.FILE_NAME) if path.exists()]
    files = {path.name: sha256_of_file(path) for path in present}
    for name, parts in checkpoints.items():
        files |= {f"checkpoints/{name}/{file}": sha256 for file, sha256 in parts.items()}
    statement = make_statement(record, files, folder.path.name, spec.started_at, time.time())
    folder.write_json(FILE_NAME, statement)
    return sha256_of_json(record)


def kept_checkpoints(folder: RunFolder) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of weights and optimizer state of each checkpoint, by its name, from its manifest."""
    found = {}
    for step in steps(folder.checkpoints):
        try:
            manifest = manifest_of(folder.checkpoints / name_of(step))
        except CheckpointError:
            continue  # damaged: no run can start there
        found[name_of(step)] = {name: str(manifest[name].get("sha256")) for name in (WEIGHTS, OPTIMIZER)}
    return found


def evaluations_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return step and metrics of each evaluation in `metrics.jsonl`."""
    return [plain_evaluation(record) for record in read_records(folder.path, "eval")]


def plain_evaluation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return step and metrics of a record of kind "eval"."""
    metrics = {name: value for name, value in record.items() if name not in ("kind", "step", "epoch")}
    return {"step": record["step"], "metrics": metrics}
