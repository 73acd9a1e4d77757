"""When checkpoints are written, how a run resumes from one, and how a job is restored on all ranks."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.interval import parse_interval
from samebits.config.schema import CheckpointConfig
from samebits.engine.job import Job
from samebits.engine.progress import Progress
from samebits.errors import CheckpointError, DataError
from samebits.optim.build import check_state, load_state
from samebits.provenance.fingerprint import Fingerprint
from samebits.provenance.identity import check_settings
from samebits.provenance.record import STEPS_FILE, flush_steps
from samebits.storage import checkpoint
from samebits.storage.background import Background, HostCopies
from samebits.storage.checkpoint import Checkpoint
from samebits.storage.manifest import run_of
from samebits.storage.run_folder import RunFolder
from samebits.storage.weights import check_fits, file_limits, load_into

# Restoring a job from a checkpoint, on all ranks.
#
# Rank 0 reads and verifies the files, then broadcasts shapes, settings and tensors, in this order: a wrong checkpoint
# is refused before any tensor is sent.


Shape = tuple[torch.Size, torch.dtype]
Notify = Callable[[CheckpointError], None]  # receives the error of each checkpoint that is skipped
# All state but the tensors, and their shapes and types by name; (None, {}) if there is no checkpoint.
Described = tuple[dict[str, Any] | None, dict[str, Shape]]


def restore_job(job: Job, folder: Path, resume: str, notify: Notify) -> bool:
    """Restore a job from a checkpoint, and return whether there was one. Only rank 0 needs the disk.

    Args:
        job: The run; model, optimizer and progress change.
        resume: "auto" for the newest whole checkpoint in it, or a checkpoint's folder.
        notify: Called on rank 0.

    Raises:
        CheckpointError: No checkpoint of the run is whole, the requested one is not, or it belongs to another
            model. Raised on every rank.
        ConfigError: It was written with other settings.
        DataError: The size of the training set changed.
    """
    restored = _read(job, folder, resume, notify)
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


def _read(job: Job, folder: Path, resume: str, notify: Notify) -> Checkpoint | None:
    limits = file_limits(job.model)
    tensors = dict[str, Tensor]()

    def describe() -> Described:
        nonlocal tensors
        found = _find(folder, resume, notify, limits)
        if found is None:
            return None, {}
        tensors, plain = checkpoint.pack(found)
        return plain, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}

    # Shapes first: the other ranks must allocate before the tensors are broadcast.
    plain, shapes = collectives.run_on_rank0(job.world, describe)
    if plain is None:
        return None
    path = _path(folder, resume, plain["step"])
    check_settings(run_of(plain), job.config, path, is_resume=True)

    def empty(device: torch.device | str) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }

    # Everything is compared on the meta device first, so that a wrong checkpoint changes nothing, and
    # before the tensors, which may take minutes to send.
    described = checkpoint.unpack(empty("meta"), plain)
    for weights in filter(None, (described.weights, described.average)):
        check_fits(job.model, weights, path)
    check_state(job.optimizer, described.optimizer)
    device = job.world.device
    here = {name: each.to(device) for name, each in tensors.items()} or empty(device)
    collectives.broadcast_tensors(job.world, list(here.values()))
    restored = checkpoint.unpack(here, plain)
    load_into(job.model, restored.weights, path)
    return restored


def _path(folder: Path, resume: str, step: int) -> Path:
    """Return the folder of the checkpoint that `resume` refers to, given its step."""
    return folder / checkpoint.name_of(step) if resume == "auto" else Path(resume).absolute()


def _find(
    folder: Path, resume: str, notify: Notify, limits: Mapping[str, int]
) -> Checkpoint | None:
    if resume != "auto":
        return checkpoint.load_checkpoint(Path(resume), limits)
    bad = []
    for _, found in checkpoint.newest(folder, limits):
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


# When checkpoints are written, and how a run resumes from one.
#
# A save copies the state and returns; a background thread writes it (storage/checkpoint.py has the commit protocol):
#
#     rank 0, loop     step n | copy | step n+1 | ... | step m | wait | copy | ...
#     rank 0, thread              |-- write n ------------------|      |-- write m --
#     other ranks      step n |      | step n+1 | ...             nothing to do: they have the same weights


def pack_job(job: Job) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a job's current state into tensors of any shape, which training will change in place, and plain JSON."""
    progress = job.progress
    average = job.average.state if job.average is not None else {}
    optimizer = job.optimizer.state_dict()
    state = progress.to_json()
    run = dict(job.identity)
    return checkpoint.pack(
        Checkpoint(progress.step, dict(job.state()), optimizer, state, average, run)
    )


class CheckpointManager:
    """Writes a run's checkpoints in the background, on rank 0.

    On the other ranks its methods do nothing. There is one writer at a time: a save waits for the previous one, except
    a save by wall-clock time, which is postponed instead. An error in the thread is raised by the next call of any
    method. The copies take as much host memory as the checkpoint.

    Attributes:
        folder: The run folder.
        rolled_back: Steps for which the run was rolled back.
        notify: Called in the background with the step and the path of each checkpoint, once it is whole on disk.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig, world: World) -> None:
        self.folder = folder
        self._config = config
        self._is_main = world.is_main
        self._pulse = world.activity
        self._every = parse_interval(config.every)
        self._kept = parse_interval(config.keep_every) if config.keep_every is not None else None
        # Monotonic, so that a change of the system's clock neither skips nor hurries a checkpoint.
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self.rolled_back: set[int] = set()
        self.notify: Callable[[int, Path], None] = lambda step, path: None
        self._background = Background()
        self._copies = HostCopies()
        self._copied: tuple[int, dict[str, Tensor]] | None = None
        if self._is_main:  # it holds the run folder's lock, so no other process is writing there
            checkpoint.clean(folder.checkpoints)

    def is_due(self, job: Job) -> bool:
        """Return whether the interval between checkpoints is over.

        Steps and epochs are equal on all ranks. Wall-clock time is not, so rank 0 decides, which writes.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        # An error of the thread is raised here, in each step, so that a full disk ends the run at once (ADR 8).
        self._background.check()
        is_kept = self._kept is not None and self._kept.is_due(
            job.progress.step, job.order.steps_per_epoch, 0.0
        )
        is_due = self._every.is_due(
            job.progress.step, job.order.steps_per_epoch, time.monotonic() - self._saved_at
        )
        if self._every.seconds is None or is_kept:
            return is_due or is_kept
        return is_due and self._is_main and not self._background.is_busy

    def save_if_due(self, job: Job) -> None:
        """Save the current state if that is due, unless this process has saved it or is writing it."""
        if self.is_due(job) and (self._copied is None or self._copied[0] != job.progress.step):
            self.save(job)

    def save(self, job: Job) -> None:
        """Start writing a checkpoint of the current state, and remove surplus ones.

        Raises:
            CheckpointError: The previous checkpoint could not be written; those before it are whole.
        """
        self._saved_at = time.monotonic()
        if not self._is_main:
            return
        self.folder.check_there()
        step = job.progress.step
        best = job.progress.best
        # A save before a validation is repeated after it, under the same name. That replaces the folder, so the
        # checkpoint before must still exist: prune only with the save that is final for its step.
        is_final = job.is_evaluated() or not job.is_evaluation_due()
        steps_per_epoch = job.order.steps_per_epoch
        best_step = best and best["step"]

        def is_kept(step: int) -> bool:
            kept = self._kept
            return step == best_step or (
                kept is not None and kept.is_due(step, steps_per_epoch, 0.0)
            )

        prunes = is_kept if is_final else None
        tensors, plain = pack_job(job)
        if self._copied is None or self._copied[0] != step:
            # The thread must not read the copies while they change. A second save of one step has the same tensors.
            self.wait()
            self._copied = (step, self._copies.take(tensors))
        copies = self._copied[1]
        # Training continues meanwhile: `plain` is a copy, and `best` is replaced by a new dict, never changed in place.
        self._background.start(lambda: self._write(step, copies, plain, best, prunes))

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        plain: dict[str, Any],
        best: dict[str, Any] | None,
        is_kept: Callable[[int], bool] | None,  # None: a later save of this step prunes
    ) -> None:
        # Copies from a GPU are made in stream order, so they may still be under way when the thread starts (ADR 8).
        self._copies.wait()
        target = self.folder.checkpoints
        # A power cut must not leave a checkpoint whose earlier steps have lost their records.
        flush_steps(self.folder.path / STEPS_FILE)
        written = checkpoint.write(step, tensors, plain, target, self._background.moved)
        is_first = step != self._saved_step
        self._saved_step = step
        # Only now: before, best.json would name a checkpoint that a crash could leave unwritten, or prune would remove
        # the last whole one.
        if best is not None and best["step"] == step:
            checkpoint.mark_best(target, best)
        if is_first:
            self.notify(step, written)
        if is_kept is not None:
            checkpoint.prune(target, step, self._config.keep, is_kept)

    def take_over(self) -> None:
        """Continue the work of another process that was lost: the checkpoints on disk are this run's."""
        self._saved_step = max(checkpoint.steps(self.folder.checkpoints), default=None)

    def wait(self) -> None:
        """Wait until all checkpoints are on disk. Raises CheckpointError if one could not be written."""
        self._background.wait(self._beat)

    def close(self) -> None:
        """Wait until nothing is being written, and ignore errors."""
        self._background.join(self._beat)

    def _beat(self) -> None:
        self._pulse.enter("writing a checkpoint")

    def last_step(self, world: World) -> int | None:
        """Return the step of the newest checkpoint that this run wrote or resumed from, equal on all ranks.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self.wait()
        return collectives.broadcast_object(world, self._saved_step)

    def restore(self, job: Job, resume: str, notify: Notify) -> bool:
        """Restore a job from a checkpoint, and return whether there was one; see `restore_job`."""
        self.wait()  # a rollback must not read a checkpoint that is still being written
        self._copied = None  # the restored state may differ at the same step
        if not restore_job(job, self.folder.checkpoints, resume, notify):
            return False
        job.note_world()
        self._saved_step = job.progress.step
        self._keep_best(job)
        return True

    def _keep_best(self, job: Job) -> None:
        best = job.progress.best
        has_best = best is not None and best["step"] in checkpoint.steps(self.folder.checkpoints)
        # Only rank 0 sees the folder, and `best` has to be equal
        # on all ranks: it decides whether a validation is saved.
        if not collectives.broadcast_object(job.world, has_best):
            job.progress.best = None  # it is in another run folder, where it may be pruned
        elif self._is_main and best is not None:
            # the process may have died before it did so
            checkpoint.mark_best(self.folder.checkpoints, best)
