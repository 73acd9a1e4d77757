"""The provenance of a complete run: `provenance.json`, from the run's records and files."""

import json
import math
import time

from samebits.engine.job import Job
from samebits.engine.progress import Progress
from samebits.engine.run_spec import RunSpec
from samebits.provenance import step_log
from samebits.provenance.run_files import RunFiles
from samebits.provenance.run_identity import DATASET_INFO
from samebits.provenance.same_run import result_settings
from samebits.provenance.statement import FILE_NAME, Evaluation, RunRecord, add_evaluation, distinct, make_statement
from samebits.report.records import FILE_NAME as METRICS
from samebits.storage.manifest import sha256_of_file
from samebits.storage.run_folder import RunFolder


def write_provenance(spec: RunSpec, job: Job, folder: RunFolder, weights_sha256: str) -> str:
    """Write `provenance.json` into the folder of a complete run, and return its root. Called on rank 0.

    Raises:
        CheckpointError: The file cannot be written.
    """
    there = RunFiles(folder.path)
    progress, evaluations = job.progress, [*there.evaluations]
    # The last evaluation may be in another run folder, if this run resumed from a checkpoint there. Looked up by step,
    # since a resume in another folder starts `metrics.jsonl` without the earlier evaluations.
    if all(each.step != progress.evaluated_step for each in evaluations):
        finite = {name: value if math.isfinite(value) else None for name, value in progress.metrics.items()}
        evaluations.append(Evaluation.of(progress.evaluated_step, finite))
    record = RunRecord(
        # Through JSON: the root is the hash of what a verifier reads again, so both need the same types (ADR 36).
        settings=json.loads(json.dumps(result_settings(job.config))),  # lists for tuples, as they are read again
        chain=progress.chain,
        num_steps=progress.step,
        code=distinct(world.get("code", {}) for world in progress.worlds),
        environment=distinct(world.get("environment", {}) for world in progress.worlds),
        data=job.fingerprint.data,
        dataset_info_sha256=str(job.identity.get(DATASET_INFO, "")),
        evaluations=evaluations,
        checkpoints=there.checkpoints,
        weights_sha256=weights_sha256,
    )
    present = [path for path in (folder.weights, folder.path / step_log.FILE_NAME) if path.exists()]
    files = {path.name: sha256_of_file(path) for path in present}
    for name, parts in there.checkpoints.items():
        files |= {f"checkpoints/{name}/{file}": sha256 for file, sha256 in parts.items()}
    statement = make_statement(record, files, folder.path.name, spec.started_at, time.time())
    folder.write_json(FILE_NAME, statement)
    return record.root


def altered_evaluations(folder: RunFolder, progress: Progress) -> str:
    """Compare the evaluations in `metrics.jsonl`, which the statement will have, with a resumed checkpoint's hash.

    A warning is returned if they differ; "" if the run has none of them, as with another's checkpoint.
    """
    found, every = "", RunFiles(folder.path).evaluations
    for each in every:
        found = add_evaluation(found, each)
    if not every or not progress.evaluations or found == progress.evaluations:
        return ""
    return (
        f"the evaluations in {folder.path / METRICS} are not those of the checkpoint: the file was altered\n"
        "  the statement will have what the file has, and samebits verify will find the difference"
    )
