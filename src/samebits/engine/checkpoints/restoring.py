"""Restoring a job from a checkpoint, on all ranks.

Rank 0 reads and verifies the files, then broadcasts shapes, settings and tensors, in this order: a wrong checkpoint is
refused before any tensor is sent. A sharded model reads only each rank's part.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from samebits.cluster import collectives
from samebits.engine.job import Job
from samebits.engine.progress import Progress
from samebits.errors import CheckpointError, DataError
from samebits.optim.build import check_state, load_state
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.sharded_state import read_parts
from samebits.provenance.fingerprint import Fingerprint
from samebits.provenance.run_identity import check_settings
from samebits.storage import checkpoint
from samebits.storage.checkpoint import Checkpoint
from samebits.storage.checkpoint_reader import Opened, Shape, open_checkpoint
from samebits.storage.manifest import run_of
from samebits.storage.weights import check_fits, file_limits, load_into

T = TypeVar("T")
# All state but the tensors, and their shapes and types by name; (None, {}) if there is no checkpoint.
Described = tuple[dict[str, Any] | None, dict[str, Shape]]


def restore_job(job: Job, folder: Path, resume: str, notify: Callable[[CheckpointError], None]) -> bool:
    """Restore a job from a checkpoint, and return whether there was one. Only rank 0 needs the disk.

    Args:
        job: The run; model, optimizer and progress change.
        resume: "auto" for the newest whole checkpoint in it, or a checkpoint's folder.
        notify: Called on rank 0 with the error of each checkpoint that is skipped.

    Raises:
        CheckpointError: No checkpoint of the run is whole, the requested one is not, or it belongs to another
            model. Raised on every rank.
        ConfigError: It was written with other settings.
        DataError: The size of the training set changed.
    """
    restored = (_read_parts if job.replica.is_sharded else _read)(job, folder, resume, notify)
    if restored is None:
        return False
    path = _path(folder, resume, restored.step)
    progress = Progress.from_json(restored.state, path)
    progress.check_position(restored.step, job.num_steps, job.parts.monitor[0], path)
    _check_size(progress.train_size, len(job.train_data))
    load_state(job.optimizer, restored.optimizer)
    if job.average is not None:
        job.average.reset(restored.average or restored.weights)
    # Checkpoints of former versions have no size (None). From here on the run can compare it.
    job.progress = replace(progress, train_size=len(job.train_data))
    job.resumed_from = Fingerprint.from_json(progress.fingerprint)
    return True


def restore_step(job: Job, folder: Path, step: int) -> None:
    """Restore a job (model, optimizer and progress) from the checkpoint of a step; see `restore_job`."""
    # A checkpoint that is named is never skipped, so nothing is notified: its error is raised.
    restore_job(job, folder, str(folder / checkpoint.name_of(step)), lambda error: None)


def _read(job: Job, folder: Path, resume: str, notify: Callable[[CheckpointError], None]) -> Checkpoint | None:
    limits, tensors = file_limits(job.model), dict[str, Tensor]()

    def describe() -> Described:
        found = _find(folder, resume, notify, lambda path: checkpoint.load_checkpoint(path, limits))
        if found is None:
            return None, {}
        packed, plain = checkpoint.pack(found)
        tensors.update(packed)
        return plain, {name: (tensor.shape, tensor.dtype) for name, tensor in packed.items()}

    # Shapes first: the other ranks must allocate before the tensors are broadcast.
    plain, shapes = collectives.run_on_rank0(job.world, describe)
    if plain is None:
        return None
    _check_same(folder, job, plain, resume)  # before the tensors, which may take minutes to send
    device = job.world.device
    here = {
        name: tensors[name].to(device) if name in tensors else torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }
    collectives.broadcast_tensors(job.world, list(here.values()))
    restored = checkpoint.unpack(here, plain)
    path = _path(folder, resume, restored.step)
    load_into(job.model, restored.weights, path)
    if restored.average:
        check_fits(job.model, restored.average, path)
    return restored


def _read_parts(job: Job, folder: Path, resume: str, notify: Callable[[CheckpointError], None]) -> Checkpoint | None:
    limits, opened = file_limits(job.model), list[Opened]()

    def describe() -> Described:
        found = _find(folder, resume, notify, lambda path: open_checkpoint(path, limits))
        if found is None:
            return None, {}
        opened.append(found)
        return found.plain, found.shapes

    # Opened without reading tensors: no process needs memory for the whole state of a sharded run (ADR 21).
    plain, shapes = collectives.run_on_rank0(job.world, describe)
    if plain is None:
        return None
    _check_same(folder, job, plain, resume)
    # Everything is compared on the meta device first, so that a wrong checkpoint changes no shard.
    metas = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
    described = checkpoint.unpack(metas, plain)
    path = _path(folder, resume, described.step)
    check_fits(job.model, described.weights, path)
    if described.average:
        check_fits(job.model, described.average, path)
    check_state(job.optimizer, described.optimizer)
    assert isinstance(job.replica, ExactShards)
    parts = read_parts(job.replica, job.optimizer, job.world, shapes, opened[0] if opened else None)
    return checkpoint.unpack(parts, plain)


def _path(folder: Path, resume: str, step: int) -> Path:
    """Return the folder of the checkpoint that `resume` refers to, given its step."""
    return folder / checkpoint.name_of(step) if resume == "auto" else Path(resume).absolute()


def _check_same(folder: Path, job: Job, plain: dict[str, Any], resume: str) -> None:
    """Check that a checkpoint was written with this job's settings, if it records them."""
    check_settings(run_of(plain), job.config, _path(folder, resume, plain["step"]), is_resume=True)


def _find(folder: Path, resume: str, notify: Callable[[CheckpointError], None], load: Callable[[Path], T]) -> T | None:
    if resume != "auto":
        return load(Path(resume))
    bad = []
    for _, found in checkpoint.newest(folder, load):
        if not isinstance(found, CheckpointError):
            return found
        bad.append(found.what)
        notify(found)
    if bad:
        raise CheckpointError(
            f"none of the {len(bad)} checkpoints in {folder} is whole",
            cause="\n".join(bad),
            fix="Start a new run in another --run-dir.",
        )
    return None


def _check_size(before: int | None, now: int) -> None:
    """Refuse another number of samples: the order of an epoch would repeat some and omit others."""
    if before not in (None, now):
        raise DataError(
            f"the training set has {now:,} samples, and had {before:,} when the run started",
            fix="Restore the data, or start a new run with another --run-dir.",
        )
