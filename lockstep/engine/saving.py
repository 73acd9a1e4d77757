"""When checkpoints are written, and how a run resumes from one.

A save copies the state and returns; a background thread writes it (storage/checkpoint.py has the commit protocol):

    rank 0, loop     step n | copy | step n+1 | ... | step m | wait | copy | ...
    rank 0, thread              |-- write n ------------------|      |-- write m --
    other ranks      step n |      | step n+1 | ...             nothing to do: they have the same weights

With fsdp no rank has all weights. Then all ranks take part: rank 0 writes tensor by tensor, each gathered when it is
its turn, and training waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.config.interval import parse_interval
from lockstep.config.sections import CheckpointConfig
from lockstep.engine.job import Job, Progress
from lockstep.errors import CheckpointError, DataError
from lockstep.optim.build import check_state, load_state
from lockstep.parallel.sharded_state import gathering, order_of, read_parts
from lockstep.provenance.fingerprint import Fingerprint
from lockstep.provenance.run_identity import check_settings
from lockstep.storage import checkpoint
from lockstep.storage.background import Background, HostCopies
from lockstep.storage.checkpoint import Checkpoint
from lockstep.storage.checkpoint_reader import open_checkpoint
from lockstep.storage.manifest import run_of
from lockstep.storage.run_folder import RunFolder
from lockstep.storage.weights import check_fits, file_limits, load_into

if TYPE_CHECKING:
    from lockstep.parallel.sharded import Shards

T = TypeVar("T")


def pack_job(job: Job) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a job's current state into tensors of any shape, which training will change in place, and plain JSON."""
    progress, average = job.progress, job.average.state if job.average is not None else {}
    optimizer = job.optimizer.state_dict()
    state, run = progress.to_json(), dict(job.identity)
    return checkpoint.pack(Checkpoint(progress.step, dict(job.state()), optimizer, state, average, run))


class CheckpointManager:
    """Writes a run's checkpoints in the background, on rank 0.

    On the other ranks its methods do nothing, unless the model is sharded. There is one writer at a time: a save waits
    for the previous one, except a save by wall-clock time, which is postponed instead. An error in the thread is raised
    by the next call of any method. The copies take as much host memory as the checkpoint.

    Args:
        folder: The run folder.
        config: Interval and number of checkpoints.
        world: The world.

    Attributes:
        folder: The run folder.
        rolled_back: Steps for which the run was rolled back.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig, world: World) -> None:
        self.folder, self._config, self._is_main, self._pulse = folder, config, world.is_main, world.activity
        self._every = parse_interval(config.every)
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self.rolled_back: set[int] = set()
        self._background, self._copies = Background(), HostCopies()
        self._copied: tuple[int, dict[str, Tensor]] | None = None
        if self._is_main:  # it holds the run folder's lock, so no other process is writing there
            checkpoint.clean(folder.checkpoints)

    def is_due(self, job: Job) -> bool:
        """Whether the interval between checkpoints is over.

        Steps and epochs are equal on all ranks. Wall-clock time is not, so rank 0 decides: alone, as only rank 0
        writes, or for all ranks if the model is sharded.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        self._background.check()
        is_due = self._every.is_due(job.progress.step, job.order.steps_per_epoch, time.monotonic() - self._saved_at)
        if self._every.seconds is None:
            return is_due
        is_due = is_due and self._is_main and not self._background.is_busy
        return collectives.broadcast_object(job.world, is_due) if job.replica.is_sharded else is_due

    def save(self, job: Job) -> None:
        """Start writing a checkpoint of the current state, and remove surplus ones.

        Raises:
            CheckpointError: The previous checkpoint could not be written; those before it are whole.
        """
        self._saved_at = time.monotonic()
        if not self._is_main and not job.replica.is_sharded:
            return
        step, best = job.progress.step, job.progress.best
        # A save before a validation is repeated after it, under the same name. That replaces the folder, so the
        # checkpoint before must still exist: prune only with the save that is final for its step.
        is_final = job.is_evaluated() or not job.is_evaluation_due()
        tensors, plain = pack_job(job)
        if job.replica.is_sharded:
            whole, fetch = gathering(cast("Shards", job.replica), job.optimizer, tensors)
            if self._is_main:
                self._write(step, whole, plain, best, is_final, fetch)
            else:
                # Gathering is collective: all ranks fetch in the order in which rank 0 writes.
                for name in order_of(whole):
                    fetch(name)
            return
        if self._copied is None or self._copied[0] != step:
            # The thread must not read the copies while they change. A second save of one step has the same tensors.
            self.wait()
            self._copied = (step, self._copies.take(tensors))
        copies = self._copied[1]
        self._background.start(lambda: self._write(step, copies, plain, best, is_final))

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        plain: dict[str, Any],
        best: dict[str, Any] | None,
        prune: bool,
        fetch: Callable[[str], Tensor] | None = None,
    ) -> None:
        self._copies.wait()
        target = self.folder.checkpoints
        checkpoint.write(step, tensors, plain, target, self._background.moved, fetch)
        self._saved_step = step
        # Only now: before, best.json would name a checkpoint that a crash could leave unwritten, or prune would remove
        # the last whole one.
        if best is not None and best["step"] == step:
            checkpoint.mark_best(target, best)
        if prune:
            checkpoint.prune(target, step, self._config.keep, best["step"] if best else None)

    def wait(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
            CheckpointError: One could not be written.
        """
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

    def restore(self, job: Job, resume: str, notify: Callable[[CheckpointError], None]) -> bool:
        """Restore a job from a checkpoint. Rank 0 reads it and broadcasts it, so only rank 0 needs the disk.

        Args:
            job: The run; model, optimizer and progress change.
            resume: "auto" for the newest whole checkpoint of the run folder, or a checkpoint's folder.
            notify: Called on rank 0 with the error of each checkpoint that is skipped.

        Returns:
            Whether there was a checkpoint.

        Raises:
            CheckpointError: No checkpoint of the run is whole, the requested one is not, or it belongs to another
                model.
            DataError: The size of the training set changed.
        """
        self.wait()  # a rollback must not read a checkpoint that is still being written
        self._copied = None  # the restored state may differ at the same step
        restored = (self._read_parts if job.replica.is_sharded else self._read)(job, resume, notify)
        if restored is None:
            return False
        path = self._path(resume, restored.step)
        progress = Progress.from_json(restored.state, path)
        progress.check_position(restored.step, job.num_steps, job.parts.monitor[0], path)
        _check_size(progress.train_size, len(job.train_data))
        load_state(job.optimizer, restored.optimizer)
        if job.average is not None:
            job.average.reset(restored.average or restored.weights)
        job.progress = replace(progress, train_size=len(job.train_data))
        job.resumed_from = Fingerprint.from_json(progress.fingerprint)
        job.note_world()
        self._saved_step = restored.step
        self._keep_best(job)
        return True

    def _keep_best(self, job: Job) -> None:
        best = job.progress.best
        has_best = best is not None and best["step"] in checkpoint.steps(self.folder.checkpoints)
        if not collectives.broadcast_object(job.world, has_best):
            job.progress.best = None  # it is in another run folder, where it may be pruned
        elif self._is_main and best is not None:
            checkpoint.mark_best(self.folder.checkpoints, best)  # the process may have died before it did so

    def _read(self, job: Job, resume: str, notify: Callable[[CheckpointError], None]) -> Checkpoint | None:
        load, limits = checkpoint.load_checkpoint, file_limits(job.model)
        found = self._find(resume, notify, lambda path: load(path, limits)) if self._is_main else None
        tensors, plain = checkpoint.pack(found) if found is not None else ({}, None)
        # Shapes first: the other ranks must allocate before the tensors are broadcast.
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        plain, shapes = collectives.broadcast_object(job.world, (plain, shapes))
        if plain is None:
            return None
        self._check_same(job, plain, resume)  # before the tensors, which may take minutes to send
        device = job.world.device
        here = {
            name: tensors[name].to(device) if name in tensors else torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        collectives.broadcast_tensors(job.world, list(here.values()))
        restored = checkpoint.unpack(here, plain)
        path = self._path(resume, restored.step)
        load_into(job.model, restored.weights, path)
        if restored.average:
            check_fits(job.model, restored.average, path)
        return restored

    def _read_parts(self, job: Job, resume: str, notify: Callable[[CheckpointError], None]) -> Checkpoint | None:
        limits = file_limits(job.model)
        opened = self._find(resume, notify, lambda path: open_checkpoint(path, limits)) if self._is_main else None
        mine = (opened.plain, opened.shapes) if opened is not None else (None, {})
        plain, shapes = collectives.broadcast_object(job.world, mine)
        if plain is None:
            return None
        self._check_same(job, plain, resume)
        # Everything is compared on the meta device first, so that a wrong checkpoint changes no shard.
        metas = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
        described = checkpoint.unpack(metas, plain)
        path = self._path(resume, described.step)
        check_fits(job.model, described.weights, path)
        if described.average:
            check_fits(job.model, described.average, path)
        check_state(job.optimizer, described.optimizer)
        return checkpoint.unpack(
            read_parts(cast("Shards", job.replica), job.optimizer, job.world, shapes, opened), plain
        )

    def _path(self, resume: str, step: int) -> Path:
        """Return the folder of the checkpoint that `resume` refers to, given its step."""
        return self.folder.checkpoints / checkpoint.name_of(step) if resume == "auto" else Path(resume).absolute()

    def _check_same(self, job: Job, plain: dict[str, Any], resume: str) -> None:
        """Check that a checkpoint was written with this job's settings, if it records them."""
        check_settings(run_of(plain), job.config, self._path(resume, plain["step"]), is_resume=True)

    def _find(self, resume: str, notify: Callable[[CheckpointError], None], load: Callable[[Path], T]) -> T | None:
        if resume != "auto":
            return load(Path(resume))
        bad = []
        for _, found in checkpoint.newest(self.folder.checkpoints, load):
            if not isinstance(found, CheckpointError):
                return found
            bad.append(found.what)
            notify(found)
        if bad:
            raise CheckpointError(
                f"none of the {len(bad)} checkpoints in {self.folder.checkpoints} is whole",
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
