"""When checkpoints are written, and how a run resumes from one.

A save copies the state and returns; a background thread writes it (storage/checkpoint.py has the commit protocol):

    rank 0, loop     step n | copy | step n+1 | ... | step m | wait | copy | ...
    rank 0, thread              |-- write n ------------------|      |-- write m --
    other ranks      step n |      | step n+1 | ...             nothing to do: they have the same weights

With fsdp no rank has all weights. Then all ranks take part: rank 0 writes tensor by tensor, each gathered when it is
its turn, and training waits.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.world import World
from samebits.config.interval import parse_interval
from samebits.config.sections import CheckpointConfig
from samebits.engine.checkpoints.restoring import restore_job
from samebits.engine.job import Job
from samebits.errors import CheckpointError
from samebits.parallel.exact_fsdp.replica import ExactShards
from samebits.parallel.sharded_state import gathering, order_of
from samebits.provenance.step_log import FILE_NAME as STEPS
from samebits.provenance.step_log import flush_steps
from samebits.storage import checkpoint
from samebits.storage.background import Background, HostCopies
from samebits.storage.checkpoint import Checkpoint
from samebits.storage.run_folder import RunFolder


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

    Attributes:
        folder: The run folder.
        rolled_back: Steps for which the run was rolled back.
        notify: Called in the background with the step and the path of each checkpoint, once it is whole on disk.
    """

    def __init__(self, folder: RunFolder, config: CheckpointConfig, world: World) -> None:
        self.folder, self._config, self._is_main, self._pulse = folder, config, world.is_main, world.activity
        self._every = parse_interval(config.every)
        self._kept = parse_interval(config.keep_every) if config.keep_every is not None else None
        # Monotonic, so that a change of the system's clock neither skips nor hurries a checkpoint.
        self._saved_at = time.monotonic()
        self._saved_step: int | None = None
        self.rolled_back: set[int] = set()
        self.notify: Callable[[int, Path], None] = lambda step, path: None
        self._background, self._copies = Background(), HostCopies()
        self._copied: tuple[int, dict[str, Tensor]] | None = None
        if self._is_main:  # it holds the run folder's lock, so no other process is writing there
            checkpoint.clean(folder.checkpoints)

    def is_due(self, job: Job) -> bool:
        """Return whether the interval between checkpoints is over.

        Steps and epochs are equal on all ranks. Wall-clock time is not, so rank 0 decides: alone, as only rank 0
        writes, or for all ranks if the model is sharded.

        Raises:
            CheckpointError: The previous checkpoint could not be written.
        """
        # An error of the thread is raised here, in each step, so that a full disk ends the run at once (ADR 8).
        self._background.check()
        is_kept = self._kept is not None and self._kept.is_due(job.progress.step, job.order.steps_per_epoch, 0.0)
        is_due = self._every.is_due(job.progress.step, job.order.steps_per_epoch, time.monotonic() - self._saved_at)
        if self._every.seconds is None or is_kept:
            return is_due or is_kept
        is_due = is_due and self._is_main and not self._background.is_busy
        return collectives.broadcast_object(job.world, is_due) if job.replica.is_sharded else is_due

    def save_if_due(self, job: Job) -> None:
        """Save the current state if that is due, unless this process has saved it or is writing it."""
        if self.is_due(job) and (self._copied is None or self._copied[0] != job.progress.step):
            self.save(job)

    def _keeper(self, job: Job) -> Callable[[int], bool]:
        """Return a function of a step: whether its checkpoint is the best one, or kept by `checkpoint.keep_every`."""
        kept, best = self._kept, job.progress.best and job.progress.best["step"]
        if kept is None:
            return lambda step: step == best
        steps_per_epoch = job.order.steps_per_epoch
        return lambda step: step == best or kept.is_due(step, steps_per_epoch, 0.0)

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
        is_kept = self._keeper(job)
        tensors, plain = pack_job(job)
        if isinstance(job.replica, ExactShards):
            whole, fetch = gathering(job.replica, job.optimizer, tensors)
            if self._is_main:
                self._write(step, whole, plain, best, is_kept if is_final else None, fetch)
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
        # Training continues meanwhile: `plain` is a copy, and `best` is replaced by a new dict, never changed in place.
        self._background.start(lambda: self._write(step, copies, plain, best, is_kept if is_final else None))

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        plain: dict[str, Any],
        best: dict[str, Any] | None,
        is_kept: Callable[[int], bool] | None,  # None: a later save of this step prunes
        fetch: Callable[[str], Tensor] | None = None,
    ) -> None:
        # Copies from a GPU are made in stream order, so they may still be under way when the thread starts (ADR 8).
        self._copies.wait()
        target = self.folder.checkpoints
        # A power cut must not leave a checkpoint whose earlier steps have lost their records.
        flush_steps(self.folder.path / STEPS)
        written = checkpoint.write(step, tensors, plain, target, self._background.moved, fetch)
        is_first, self._saved_step = step != self._saved_step, step
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

    def restore(self, job: Job, resume: str, notify: Callable[[CheckpointError], None]) -> bool:
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
            checkpoint.mark_best(self.folder.checkpoints, best)  # the process may have died before it did so
