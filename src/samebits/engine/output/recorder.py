"""The record of each step of a run, for `samebits verify` and `samebits diff`, and the provenance of the whole."""

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from samebits.cluster import collectives
from samebits.data.division import Alone
from samebits.data.order import WINDOW, Order, Step
from samebits.engine.job import Job
from samebits.engine.progress import Progress, StepResult
from samebits.engine.run_spec import RunSpec
from samebits.provenance.identity import DATASET_INFO, result_settings
from samebits.provenance.record import (
    APPLIED,
    DIGEST_BYTES,
    FIRST_LINK,
    NO_DIGEST,
    OVERFLOW,
    SKIPPED,
    STATEMENT_FILE,
    STEPS_FILE,
    Evaluation,
    RunStatement,
    StepLog,
    StepRecord,
    StepWriter,
    add_evaluation,
    digest_of_samples,
    distinct,
    environments,
    make_statement,
    read_steps,
)
from samebits.provenance.run_files import RunFiles
from samebits.report.records import FILE_NAME as METRICS
from samebits.storage.manifest import sha256_of_file
from samebits.storage.run_folder import RunFolder

# Record of each step of a run, for `samebits verify` and `samebits diff`. It observes the run and changes nothing.


def digest_of_step(step: Step) -> bytes:
    """Return the digest (16 bytes) of the sample ids of a step whose micro-batches are all here."""
    return digest_of_samples(
        np.concatenate([micro_batch.indices for micro_batch in step.micro_batches])
    )


def sample_ids(order: Order, start: int, stop: int) -> Iterator[bytes]:
    """Yield the digest (16 bytes) of each step's sample ids, over all ranks, from step `start` until before `stop`."""
    if order.groups is not None:
        # Groups have micro-batches of one width each, so a step's positions are not consecutive.
        yield from map(digest_of_step, order.steps(Alone(), start=start, stop=stop))
        return
    # Micro-batches of a step are consecutive positions, so their keys need not be computed: half of the time.
    while start < stop:
        epoch = start // order.steps_per_epoch
        last = min(
            stop, (epoch + 1) * order.steps_per_epoch, start + max(1, WINDOW // order.global_batch)
        )
        bounds = [order.positions(step) for step in range(start, last)]
        origin = bounds[0][0]
        indices = order.indices(epoch, np.arange(origin, bounds[-1][1]))
        for begin, end in bounds:
            yield digest_of_samples(indices[begin - origin : end - origin])
        start = last


def digest_content(job: Job) -> bytes:
    """Return the digest (16 bytes) of the values of the last step's samples over all ranks. Called on all ranks."""
    assert job.loader is not None
    assert job.loader.digests is not None
    # Taken and emptied in each step: the next one must not send them again.
    mine = job.loader.digests
    job.loader.digests = []
    # Ranks have consecutive micro-batches, so this order is that of the step.
    every = [
        bytes(digest) for rank in collectives.all_gather_object(job.world, mine) for digest in rank
    ]
    return hashlib.sha256(b"".join(every)).digest()[:DIGEST_BYTES]


def record_of(step: Step, result: StepResult, samples: bytes, content: bytes) -> StepRecord:
    """Return the record of a completed step, with digests (16 bytes) of its sample ids and of the samples' values."""
    outcome = OVERFLOW if result.is_overflow else APPLIED if result.is_finite else SKIPPED
    return StepRecord(step.number, result.loss, result.norm, result.lr, samples, content, outcome)


def recover_chain(job: Job, folder: Path) -> str:
    """Return the link before the job's next step, from the records of a process that was lost.

    The record of the last step is written if that process was lost before it had written it.

    Raises:
        CheckpointError: The records are damaged, or cannot be written.
    """
    if not job.config.record.steps:
        return ""
    path = folder / STEPS_FILE
    step = job.progress.step
    # Lost before its first record: the file is made when training starts.
    # `head` cuts records of steps that the lost process had completed and the other ranks have not.
    log = StepLog() if step <= 1 and not path.exists() else read_steps(path).head(step)
    writer = StepWriter(path, log.stop, log.link())
    if job.last_result is not None and log.stop == step - 1 == job.last_result[0]:
        plan = next(job.order.steps(job.world, start=step - 1, stop=step))
        ids = next(sample_ids(job.order, step - 1, step))
        # Digests of values exist only with `record.content`, which in-step recovery excludes (ADR 48).
        writer.append(record_of(plan, job.last_result[1], ids, NO_DIGEST))
    writer.close()
    return writer.link.hex()


class StepRecorder:
    """Writes `steps.bin` on rank 0, and keeps the chain's link in the run's progress."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._path = folder / STEPS_FILE
        self._is_on = job.config.record.steps
        self._writer: StepWriter | None = None
        self._ids: Iterator[bytes] = iter(())
        self._next_id = -1  # the step whose digest `_ids` yields next

    def start(self, job: Job) -> str:
        """Start or resume at the job's step; return a warning if earlier steps are not in the file, otherwise "".

        Records of later steps, which will be repeated, are removed.

        Raises:
            CheckpointError: The file cannot be written.
        """
        self.close()
        if not self._is_on:
            # An old chain must not go into new checkpoints when recording is off: it would no longer cover all steps.
            job.progress.chain = ""
            return ""
        if job.config.record.content and job.loader is not None:
            # On all ranks: each one digests its own samples, and rank 0 gathers them.
            job.loader.digests = []
        if not job.world.is_main:
            return ""
        step = job.progress.step
        link = job.progress.chain
        self._writer = StepWriter(self._path, step, bytes.fromhex(link) if link else FIRST_LINK)
        job.progress.chain = self._writer.link.hex()
        if self._writer.is_continued:
            return ""
        return (
            f"the record of steps before step {step:,} is missing or belongs to another run: {self._path}\n"
            "  samebits verify can check this run from its first step only, with --from-scratch"
        )

    def step(self, job: Job, step: Step, result: StepResult) -> None:
        """Record a completed step. Called on all ranks.

        Raises:
            CheckpointError: The record cannot be written.
        """
        if not self._is_on:
            return
        content = digest_content(job) if job.config.record.content else NO_DIGEST
        if self._writer is not None:
            samples = (
                digest_of_step(step) if step.has_all else self._digest_of_ids(job, step.number)
            )
            self._writer.append(record_of(step, result, samples, content))
            job.progress.chain = self._writer.link.hex()

    def _digest_of_ids(self, job: Job, number: int) -> bytes:
        """Return the digest (16 bytes) of the sample ids of a step that other ranks have a part of."""
        if number != self._next_id:  # after a resume, or steps of which this rank had all
            self._ids = sample_ids(job.order, number, job.num_steps)
        self._next_id = number + 1
        return next(self._ids)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# The provenance of a complete run: `provenance.json`, from the run's records and files.


def write_provenance(spec: RunSpec, job: Job, folder: RunFolder, weights_sha256: str) -> str:
    """Write `provenance.json` into the folder of a complete run, and return its root. Called on rank 0.

    Raises:
        CheckpointError: The file cannot be written.
    """
    there = RunFiles(folder.path)
    progress = job.progress
    evaluations = [*there.evaluations()]
    # The last evaluation may be in another run folder, if this run resumed from a checkpoint there. Looked up by step,
    # since a resume in another folder starts `metrics.jsonl` without the earlier evaluations.
    if all(each.step != progress.evaluated_step for each in evaluations):
        evaluations.append(Evaluation.of(progress.evaluated_step, progress.metrics))
    record = RunStatement(
        # Through JSON: the root is the hash of what a verifier reads again, so both need the same types (ADR 36).
        settings=json.loads(
            json.dumps(result_settings(job.config))
        ),  # lists for tuples, as they are read again
        chain=progress.chain,
        num_steps=progress.step,
        code=distinct(world.get("code", {}) for world in progress.worlds),
        environment=environments(progress.worlds),
        data=job.fingerprint.data,
        dataset_info_sha256=str(job.identity.get(DATASET_INFO, "")),
        evaluations=evaluations,
        checkpoints=there.checkpoints,
        weights_sha256=weights_sha256,
    )
    present = [path for path in (folder.weights, folder.path / STEPS_FILE) if path.exists()]
    files = {path.name: sha256_of_file(path) for path in present}
    for name, parts in there.checkpoints.items():
        files |= {f"checkpoints/{name}/{file}": sha256 for file, sha256 in parts.items()}
    statement = make_statement(record, files, folder.path.name, spec.started_at, time.time())
    folder.write_json(STATEMENT_FILE, statement)
    return record.root


def altered_evaluations(folder: RunFolder, progress: Progress) -> str:
    """Compare the evaluations in `metrics.jsonl`, which the statement will have, with a resumed checkpoint's hash.

    A warning is returned if they differ; "" if the run has none of them, as with another's checkpoint.
    """
    found = ""
    for each in RunFiles(folder.path).evaluations():
        found = add_evaluation(found, each)
    if not found or not progress.evaluations or found == progress.evaluations:
        return ""
    return (
        f"the evaluations in {folder.path / METRICS} are not those of the checkpoint: the file was altered\n"
        "  the statement will have what the file has, and samebits verify will find the difference"
    )
