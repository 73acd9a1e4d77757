"""One optimizer step.

    micro-batches of this rank      read -> forward -> backward      gradients go into the leaves of the tree
    reduce                          tree over local leaves, then over ranks: the same sums at any world size
    update                          clip, optimizer, moving average; skipped on all ranks if a sum is not finite

Exactness rests on three rules. No value computed before `reduce` may depend on the world. Every rank must compute the
update from the reduced sums alone. And a skipped step must leave no trace: buffers such as batch norm's statistics are
restored.
"""

import math
from collections.abc import Callable

from samebits.cluster.activity import COMPUTING, READING
from samebits.data.loader import BatchSource
from samebits.data.order import MicroBatch, Step
from samebits.engine.forward import forward
from samebits.engine.job import Job
from samebits.engine.progress import StepFlags, StepResult, update_scale
from samebits.optim.schedule import factor


def run_step(
    job: Job, step: Step, loader: BatchSource, flags: Callable[[], StepFlags] = lambda: StepFlags(0)
) -> StepResult:
    """Run one optimizer step. `flags` returns rank 0's decisions for all ranks, and is called after the passes."""
    optim = job.config.optim
    # From the step number, not from a scheduler's state: a resumed run has the same rate.
    lr = job.config.peak_lr * factor(step.number, job.num_steps, job.order.steps_per_epoch, optim)
    names: list[str] = []
    activity = job.world.activity

    def run_micro_batch(micro_batch: MicroBatch) -> None:
        nonlocal names
        activity.enter(READING)
        batch = loader.batch(micro_batch.indices, micro_batch.keys)
        activity.enter(COMPUTING)
        with job.reducer.micro_batch(micro_batch):
            names, loss, terms = forward(job, batch)
            job.reducer.backward(loss, terms)

    activity.begin_step(step.number, job.world.device)
    # The loss is multiplied by the scale, and each leaf is divided by it: a power of two, so neither rounds (ADR 16).
    job.reducer.begin(step, job.progress.loss_scale)
    # with batch_norm=sync, micro-batches are interleaved coroutines
    job.reducer.run(run_micro_batch)
    activity.end_work(len(step.micro_batches))
    # Called here, after the passes, so that a signal during them is seen in this step.
    job.reducer.reduce(float(flags()))
    activity.end_wait()

    extras = job.reducer.extras
    norm = job.reducer.norm
    decided = StepFlags.unpack(job.reducer.flag)
    # Sums over all ranks: the decision to skip is the same everywhere.
    is_finite = math.isfinite(norm) and all(map(math.isfinite, extras))
    is_overflow = update_scale(job.progress, job.config, extras, is_finite=is_finite)
    if is_finite:
        if optim.clip_norm is not None and norm > optim.clip_norm:
            job.reducer.scale(optim.clip_norm / norm)
        for group in job.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        job.optimizer.step()
        if job.average is not None:
            job.average.update(step.number + 1)
    else:
        job.reducer.undo_buffers()  # the forward passes have already updated batch norm's statistics
    terms = dict(zip(names, extras, strict=False))
    result = StepResult(sum(extras), terms, norm, lr, is_finite, is_overflow, decided)
    job.last_result = step.number, result  # from here on the step counts as applied
    return result
