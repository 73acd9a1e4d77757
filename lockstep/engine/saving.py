"""When checkpoints are written and how a run goes on from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lockstep.cluster import collectives
from lockstep.cluster.world import World
from lockstep.config.interval import parse_interval
from lockstep.config.schema import CheckpointConfig
from lockstep.engine.job import Job, Progress
from lockstep.errors import CheckpointError, DataError
from lockstep.optim.build import check_state, load_state
from lockstep.parallel.sharded_state import gathering, order_of, read_parts
from lockstep.provenance.fingerprint import Fingerprint
from lockstep.provenance.run_identity import check_settings
from lockstep.storage import checkpoint
from lockstep.storage.background import Background, Copies
from lockstep.storage.checkpoint import Checkpoint
from lockstep.storage.checkpoint_reader import open_checkpoint
from lockstep.storage.run_folder import RunFolder
from lockstep.storage.weights import check_fits, file_limits, load_into

if TYPE_CHECKING:
    from lockstep.parallel.sharded import Shards

T = TypeVar("T")


def pack_job(job: Job) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a checkpoint holds, as it is now: tensors, which training goes on to change, and plain JSON."""
    progress, average = job.progress, job.average.state if job.average is not None else {}
    optimizer = job.optimizer.state_dict()
    state, run = progress.to_json(), dict(job.identity)
    return checkpoint.pack(Checkpoint(progress.step, dict(job.state()), optimizer, state, average, run))


class CheckpointManager:
    """Writes a run's checkpoints beside training, on rank 0; on other ranks its methods do nothing, unless the model is
    sharded: then all of them have a part in a save, and training waits for it.

    `save` copies what is to be saved and returns; a thread writes it. There is one writer at a time: where the one
    before is still under way, a save waits for it, unless it is one by the clock, which is put off until then. What
    goes wrong in the thread is raised by the next call of any method. Copies take as much memory of the host as the
    checkpoint itself.

    Attributes:
        folder: The run folder.
        rolled_back: Steps that the run has gone back for.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig, world: World) -> None:
        self.folder, self._config, self._is_main, self._pulse = folder, config, world.is_main, world.activity
        self._every = parse_interval(config.every)
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self.rolled_back: set[int] = set()
        self._background, self._copies = Background(), Copies()
        self._copied: tuple[int, dict[str, Tensor]] | None = None
        if self._is_main:
            checkpoint.clean(folder.checkpoints)

    def is_due(self, job: Job) -> bool:
        """Whether the interval between checkpoints is over.

        By steps or epochs all ranks say the same. By the clock only rank 0 decides, as only rank 0 writes.

        Raises:
            CheckpointError: The last one could not be written.
        """
        self._background.check()
        step = job.progress.step
        if self._every.steps is not None:
            return step % self._every.steps == 0
        if self._every.epochs is not None:
            return step % (self._every.epochs * job.order.steps_per_epoch) == 0
        assert self._every.seconds is not None
        is_over = time.monotonic() - self._saved_at >= self._every.seconds
        is_due = self._is_main and is_over and not self._background.is_busy
        return is_due if job.shards is None else collectives.broadcast_object(job.world, is_due)

    def save(self, job: Job) -> None:
        """Have a checkpoint written of where the run stands, and those removed that are too many.

        Raises:
            CheckpointError: The one before could not be written; those before it are whole.
        """
        self._saved_at = time.monotonic()
        if not self._is_main and job.shards is None:
            return
        step, best = job.progress.step, job.progress.best
        # Before an evaluation this one is soon written again, and in that moment one before it must be there.
        is_last_word = job.is_evaluated() or not job.is_evaluation_due()
        tensors, plain = pack_job(job)
        if job.shards is not None:
            whole, fetch = gathering(job.shards, job.optimizer, tensors)
            if self._is_main:
                self._write(step, whole, plain, best, is_last_word, fetch)
            else:
                for name in order_of(whole):
                    fetch(name)
            return
        if self._copied is None or self._copied[0] != step:
            # Nobody may read the copies while they change. The same step again has the same tensors.
            self.wait()
            self._copied = (step, self._copies.take(tensors))
        copies = self._copied[1]
        self._background.start(lambda: self._write(step, copies, plain, best, is_last_word))

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
        place = self.folder.checkpoints
        checkpoint.write(step, tensors, plain, place, self._background.moved, fetch)
        self._saved_step = step
        if best is not None and best["step"] == step:
            checkpoint.mark_best(place, best)
        if prune:
            checkpoint.prune(place, step, self._config.keep, best["step"] if best else None)

    def wait(self) -> None:
        """Wait until all checkpoints are on disk.

        Raises:
            CheckpointError: One could not be written.
        """
        self._background.wait(self._beat)

    def close(self) -> None:
        """Wait until nothing is being written any more, whatever comes of it."""
        self._background.join(self._beat)

    def _beat(self) -> None:
        self._pulse.enter("waiting for the disk to take a checkpoint")

    def last_step(self, world: World) -> int | None:
        """The step of the newest checkpoint that this run wrote or came from; the same on all ranks.

        Raises:
            CheckpointError: The last one could not be written.
        """
        self.wait()
        return collectives.broadcast_object(world, self._saved_step)

    def restore(self, job: Job, resume: str, say: Callable[[CheckpointError], None]) -> bool:
        """Bring a job to a checkpoint. Rank 0 reads it; the others get it from there, so only rank 0 needs the disk.

        Args:
            job: The run; model, optimizer and progress change.
            resume: "auto" for the newest whole checkpoint of the run folder, or a checkpoint's folder.
            say: Called on rank 0 with what is wrong with checkpoints that are passed over.

        Returns:
            Whether there was one.

        Raises:
            CheckpointError: None of the run's checkpoints is whole, or the one asked for is not, or it is of another
                model.
            DataError: The training set has another size since.
        """
        self.wait()
        self._copied = None
        restored = (
            self._read(job, resume, say) if job.shards is None else self._read_parts(job, job.shards, resume, say)
        )
        if restored is None:
            return False
        place = self._place(resume, restored.step)
        progress = Progress.from_json(restored.state, place)
        progress.check_position(restored.step, job.num_steps, job.parts.monitor[0], place)
        _check_size(progress.train_size, len(job.train_data))
        load_state(job.optimizer, restored.optimizer)
        if job.average is not None:
            job.average.begin(restored.average or restored.weights)
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
            job.progress.best = None  # of another run folder: what stands there may go, and isn't this run's
        elif self._is_main and best is not None:
            checkpoint.mark_best(self.folder.checkpoints, best)  # the process may have died before it did

    def _read(self, job: Job, resume: str, say: Callable[[CheckpointError], None]) -> Checkpoint | None:
        load, limits = checkpoint.load_checkpoint, file_limits(job.model)
        found = self._find(resume, say, lambda path: load(path, limits)) if self._is_main else None
        tensors, plain = checkpoint.pack(found) if found is not None else ({}, None)
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        plain, shapes = collectives.broadcast_object(job.world, (plain, shapes))
        if plain is None:
            return None
        self._check_same(job, plain, resume)
        device = job.world.device
        here = {
            name: tensors[name].to(device) if name in tensors else torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        collectives.broadcast_tensors(job.world, list(here.values()))
        restored = checkpoint.unpack(here, plain)
        place = self._place(resume, restored.step)
        load_into(job.model, restored.weights, place)
        if restored.average:
            check_fits(job.model, restored.average, place)
        return restored

    def _read_parts(
        self, job: Job, shards: Shards, resume: str, say: Callable[[CheckpointError], None]
    ) -> Checkpoint | None:
        limits = file_limits(job.model)
        opened = self._find(resume, say, lambda path: open_checkpoint(path, limits)) if self._is_main else None
        mine = (opened.plain, opened.shapes) if opened is not None else (None, {})
        plain, shapes = collectives.broadcast_object(job.world, mine)
        if plain is None:
            return None
        self._check_same(job, plain, resume)
        metas = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
        described = checkpoint.unpack(metas, plain)
        place = self._place(resume, described.step)
        check_fits(job.model, described.weights, place)
        if described.average:
            check_fits(job.model, described.average, place)
        check_state(job.optimizer, described.optimizer)
        return checkpoint.unpack(read_parts(shards, job.optimizer, job.world, shapes, opened), plain)

    def _place(self, resume: str, step: int) -> Path:
        """The checkpoint that `resume` named, by its step."""
        return self.folder.checkpoints / checkpoint.name_of(step) if resume == "auto" else Path(resume).absolute()

    def _check_same(self, job: Job, plain: dict[str, Any], resume: str) -> None:
        """See that a checkpoint was written with this job's settings, as far as it tells."""
        check_settings(checkpoint.run_of(plain), job.config, self._place(resume, plain["step"]), is_resume=True)

    def _find(self, resume: str, say: Callable[[CheckpointError], None], load: Callable[[Path], T]) -> T | None:
        if resume != "auto":
            return load(Path(resume))
        bad = []
        for _, found in checkpoint.newest(self.folder.checkpoints, load):
            if not isinstance(found, CheckpointError):
                return found
            bad.append(found.what)
            say(found)
        if bad:
            raise CheckpointError(
                f"none of the {len(bad)} checkpoints in {self.folder.checkpoints} is whole",
                found="\n".join(bad),
                fix="start anew in another --run-dir",
            )
        return None


def _check_size(before: int | None, now: int) -> None:
    """An epoch's order is one of so many samples: with more or fewer, some would come twice, and some never."""
    if before not in (None, now):
        raise DataError(
            f"the training set has {now:,} samples, and had {before:,} when the run began",
            fix="put the data back as it was, or begin a new run: another --run-dir",
        )
