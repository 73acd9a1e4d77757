"""One process's part of a run whose world may change: the loss of a process does not end the others.

    train ── error of a connection, or the flag JOIN ──> suspend the step: which partial sums are whole
      ^                                                  regroup: the group of the next view
      |                                                  agree: steps applied, who holds which sums
      |                                                  the source sends its weights to those that need them
      └── the step's missing micro-batches ── move to the new world; a new rank 0 takes over the run folder

Up to "move" nothing of the run's state has changed, so a further loss on the way starts again with the next view.
`src/samebits/parallel/recoverable.py` has the rules, and ADR 48 the state machine.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.cluster import collectives
from samebits.cluster.views.membership import Membership, RunEnded
from samebits.cluster.views.regroup import is_loss, regroup
from samebits.cluster.views.torch_traps import wait_for_peers
from samebits.cluster.world import World
from samebits.data.division import Division
from samebits.engine.checkpoints import pack_job
from samebits.engine.job import Job
from samebits.engine.opening import OpenRun
from samebits.engine.progress import Progress, StepResult
from samebits.errors import LaunchError
from samebits.optim.build import load_state
from samebits.parallel.recoverable import Agreement, RankReport, RecoverableReducer, agree
from samebits.report.format import counted
from samebits.storage import checkpoint
from samebits.storage.weights import load_into
from samebits.watchdog.detector import HangDetector

# The state of a run, sent from one rank to others that have an older one or none: raw bytes, no disk and no pickle.


SENDING = "sending the run's state"


@dataclass(frozen=True)
class Received:
    """A run's state, complete, before it replaces this rank's own."""

    #: Weights, optimizer state and moving average, of any shape, by name.
    tensors: dict[str, Tensor]
    plain: dict[str, Any]  #: All other state of a checkpoint.
    last: tuple[int, StepResult] | None  #: Number and result of the last step that was applied.


def send_or_receive(job: Job, world: World, agreement: Agreement) -> Received | None:
    """Send this rank's state, unchanged, if it is the agreement's source; return that state on its receivers."""
    if not agreement.receivers:
        return None
    is_source = world.rank == agreement.source
    is_receiver = world.rank in agreement.receivers
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {}
    if is_source:
        tensors, plain = pack_job(job)
        last = (
            (job.last_result[0], asdict(job.last_result[1]))
            if job.last_result is not None
            else None
        )
        shapes = [(name, [*tensor.shape], tensor.dtype) for name, tensor in tensors.items()]
        header = {"plain": plain, "last": last, "shapes": shapes}
    # Before the tensors, since receivers must allocate; on all ranks, since a broadcast is collective.
    header = collectives.broadcast_object(world, header, src=agreement.source)
    if is_receiver:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in header["shapes"]}
    if is_source or is_receiver:
        peers = agreement.receivers if is_source else (agreement.source,)
        call = dist.isend if is_source else dist.irecv
        # In the order of the header on both sides: messages of one pair of ranks arrive in order.
        buffers = [
            tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for tensor in tensors.values()
        ]
        with world.activity.waiting(SENDING):
            # All messages are posted before the first wait, so several receivers are served at the same time.
            works = [call(buffer, peer) for peer in peers for buffer in buffers if buffer.numel()]
            wait_for_peers(
                world.membership, lambda: [work.wait() for work in works if work is not None]
            )
    if not is_receiver:
        return None
    last = header["last"]
    return Received(
        tensors, header["plain"], None if last is None else (last[0], StepResult(**last[1]))
    )


def load(job: Job, received: Received, *, is_new: bool) -> None:
    """Replace a rank's state by the one that it received.

    Args:
        job: The run; model, optimizer, moving average and progress change.
        is_new: This rank has no progress of its own. Otherwise only what a step changes is replaced: the step is
            counted and reported afterwards.
    """
    origin = Path("the state of another rank")
    restored = checkpoint.unpack(received.tensors, received.plain)
    load_into(job.model, restored.weights, origin)
    load_state(job.optimizer, restored.optimizer)
    if job.average is not None:
        job.average.reset(restored.average or restored.weights)
    progress = Progress.from_json(restored.state, origin)
    if is_new:
        job.progress = progress
        job.progress.chain = ""  # rank 0's
    for name in ("loss_scale", "scale_age", "num_overflows"):
        setattr(job.progress, name, getattr(progress, name))
    job.last_result = received.last


LOGGER = logging.getLogger("samebits")


class InStepRun:
    """A run in one process, over all worlds that this process is a member of: mostly a single one.

    Attributes:
        run: The run's objects in this process.
        is_complete: Whether the run is, where this process enters no further world.
    """

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        self._is_new = run.job.world.is_replacement
        self.is_complete = False

    def join(self) -> bool:
        """Enter the first world; return False if the run was completed or stopped before."""
        membership = self.run.job.world.membership
        if membership is None:
            return True  # the only one
        # A loss before all processes are ready restarts all of them instead (ADR 48).
        membership.mark("ready")
        if not self._is_new:
            membership.mark("member")
            return True
        # A replacement waits until the launcher has made it a member.
        while not self.run.has_stop():
            try:
                # Short, since the loop looks at the stop request between two waits.
                membership.wait_for_next(0.2)
            except TimeoutError:
                continue
            except RunEnded:
                return self._end()
            error = LaunchError(
                "the replacement could not join", fix="Read the output of the other ranks."
            )
            return self._enter(membership, error)
        return False

    def rejoin(self, error: RuntimeError) -> bool:
        """Enter the next world after an error of the loop; return False if another process has completed the run.

        Raises:
            RuntimeError: The error, if it is not that of a world which has lost a process or has ended.
        """
        membership = self.run.job.world.membership
        if membership is None:
            raise error
        present = membership.present
        is_ended = present is not None and membership.newest.urgent > present.number
        if not is_loss(error) and not is_ended:
            raise error
        LOGGER.info("the world has changed: %s", str(error).partition("\n")[0][:200])
        return self._enter(membership, error)

    def _watched(self) -> HangDetector:
        """Find a hang of this process while it is between two worlds."""
        job = self.run.job
        job.world.activity.enter("entering the next world")
        alone = replace(job.world, rank=0, size=1, store=None, signed=None, machines=())
        return HangDetector(alone, job.config.watch.hang_timeout_s, self.run.folder.path / "logs")

    def _end(self) -> bool:
        # Another process passed the last collective of `OpenRun.finish`, so rank 0 has written everything.
        LOGGER.info("another process has completed the run")
        job = self.run.job
        self.is_complete = self._is_new or (job.is_complete and job.is_evaluated())
        return False

    def _enter(self, membership: Membership, error: Exception) -> bool:
        """Enter the next view that stays, and continue where its members agree to; return False if there is none."""
        with self._watched():
            while True:
                # Reported, unless the launchers have named the next view already.
                if (
                    membership.present is not None
                    and membership.read().number == membership.present.number
                ):
                    membership.mark_broken(membership.present)
                try:
                    membership.wait_for_next()
                except RunEnded:
                    return self._end()
                except TimeoutError:
                    raise error from None
                try:
                    world = regroup(self.run.job.world, self.run.job.config.cluster.timeout_s)
                    agreement, received = self._agree(world)
                except RuntimeError as again:
                    if not is_loss(again):
                        raise
                    error = again
                    continue
                self._move(world, agreement, received)
                membership.mark("member")
                return True

    def _agree(self, world: World) -> tuple[Agreement, Received | None]:
        """Agree on where to continue, and receive the weights if this rank needs them. Changes no state of the run."""
        job = self.run.job
        reducer = self._reducer
        # A partial sum that an exchange has begun to change is not whole, and must not be offered to the others.
        nodes = reducer.suspend()
        self._complete_last_step()
        progress = job.progress
        report = (
            RankReport(-1)
            if self._is_new
            else RankReport(progress.step, progress.evaluated_step, nodes)
        )
        # Only equality is needed, so all ranks send a digest instead of their fingerprints.
        code = hashlib.sha256(
            json.dumps(job.fingerprint.to_json(), sort_keys=True).encode()
        ).hexdigest()
        found = collectives.all_gather_object(world, (asdict(report), code))
        reports = [
            RankReport(**{**each, "nodes": tuple(map(tuple, each["nodes"]))}) for each, _ in found
        ]
        agreement = agree(reports)
        if self._is_new and code != found[agreement.source][1]:
            raise LaunchError(
                "the code, data or packages of a new process differ from those of the others",
                cause="A file was changed since the run started.",
                fix="Restore it, or stop the run and resume it.",
            )
        # A rank was lost before it had completed the validation. A validation counts on all ranks or on none (ADR 48).
        if not self._is_new and progress.evaluated_step > agreement.evaluated_step:
            job.forget_evaluation()
        return agreement, send_or_receive(job, world, agreement)

    def _move(self, world: World, agreement: Agreement, received: Received | None) -> None:
        """Continue in a new world. Calls no other rank, so a loss cannot leave it half done."""
        job = self.run.job
        reducer = self._reducer
        was_main = job.world.is_main
        if received is not None:
            reducer.drop_step()
            load(job, received, is_new=self._is_new)
            self._complete_last_step()
        self._is_new = False
        job.world = world
        job.resumed = None
        reducer.move_to(world)
        number = agreement.num_steps
        if any(agreement.held) and number < job.num_steps:
            (step,) = job.order.steps(world, start=number, stop=number + 1)
            division = Division(dealt=agreement.deal(step.num_micro_batches), held=agreement.held)
            (job.resumed,) = job.order.steps(
                world, start=number, stop=number + 1, division=division
            )
        job.note_world()
        if world.is_main and not was_main:
            self.run.take_over()
        self._report(agreement)

    def _report(self, agreement: Agreement) -> None:
        job = self.run.job
        size = self.run.job.world.size
        text = f"continuing with {counted(size, 'process')} at step {agreement.num_steps + 1:,}"
        if job.resumed is not None:
            kept = sum(last - first for nodes in agreement.held for first, last in nodes)
            text += f": {kept} of its {job.resumed.num_micro_batches} micro-batches are kept"
        self.run.reports.notify(text)

    def _complete_last_step(self) -> None:
        """Count and report a step that was applied, if the loss came before that."""
        job = self.run.job
        if job.last_result is None or job.last_result[0] < job.progress.step:
            return
        number, result = job.last_result
        if not result.is_finite and not result.is_overflow:
            raise LaunchError(
                "a process was lost while a step without finite values was examined",
                fix="Resume the run.",
            )
        (step,) = job.order.steps(job.world, start=number, stop=number + 1)
        job.count_step(step, result)
        self.run.reports.step(job, step, result)

    @property
    def _reducer(self) -> RecoverableReducer:
        assert isinstance(self.run.job.reducer, RecoverableReducer)
        return self.run.job.reducer
