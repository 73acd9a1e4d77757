"""The training loop, written out: step, report, save, evaluate, in this order."""

from __future__ import annotations

import math
from collections.abc import Callable

from lockstep.engine.evaluate import EvaluationStopped, evaluate
from lockstep.engine.job import Job
from lockstep.engine.nonfinite import handle_nonfinite
from lockstep.engine.replica_check import ReplicaCheck
from lockstep.engine.reports import Reports
from lockstep.engine.saving import CheckpointManager
from lockstep.engine.step import run_step
from lockstep.errors import ConfigError

STOP, COMPARE = 1, 2  # what rank 0 tells all with a step's gradients, added up


def train(
    job: Job,
    saver: CheckpointManager,
    reports: Reports,
    stop_flag: Callable[[], float],
    stop_now: Callable[[], bool] = lambda: False,
) -> bool:
    """Run a job from where its progress stands to its last step.

    Args:
        job: The run; its progress moves on.
        saver: Writes checkpoints, on rank 0.
        reports: Tells people, on rank 0.
        stop_flag: On rank 0: 1 once the run is asked to stop. It travels with the gradients, so that all ranks stop
            after the same step.
        stop_now: The same, for any rank during an evaluation; what was evaluated so far is then thrown away.

    Returns:
        Whether the run is complete; False if it was stopped and has saved where it stands.

    Raises:
        ConfigError: The evaluation has no figure of the name in `Parts.best`.
        TrainError: A step was not finite, and watch.nonfinite says to stop; or the ranks differ.
        CheckpointError: A checkpoint could not be written.
        RollBack: ... and says to go back.
    """
    drift = ReplicaCheck(job)
    loader = job.open_loader()
    try:
        reports.begin(job)
        if job.is_evaluation_due() and not job.is_evaluated():  # it ended between its last step and its evaluation
            end_epoch(job, saver, reports, stop_now, is_due=True)
        for step in job.order.steps(job.world, start=job.progress.step, stop=job.num_steps):
            result = run_step(job, step, loader, STOP * stop_flag() + COMPARE * drift.is_due(job))
            if not result.is_finite and not result.is_overflow:
                handle_nonfinite(job, step, saver, reports)
            job.progress.step = step.number + 1
            job.progress.num_samples += step.num_samples if result.is_finite else 0
            reports.step(job, step, result)

            if int(result.flag) & COMPARE:
                drift.compare(job)  # before anything is saved
            is_stopping = bool(int(result.flag) & STOP)
            is_due = is_stopping or job.progress.step == job.num_steps or saver.is_due(job)
            if is_due:
                saver.save(job)  # before the evaluation: that may take long, or fail
            if is_stopping:
                break
            if job.is_evaluation_due():
                end_epoch(job, saver, reports, stop_now, is_due=is_due)
            if is_due or job.is_evaluation_due():
                reports.resume(job)
    except EvaluationStopped:
        saver.save(job)
    finally:
        loader.close()
        saver.close()
    saver.wait()
    return job.progress.step == job.num_steps and job.is_evaluated()


def end_epoch(
    job: Job, saver: CheckpointManager, reports: Reports, stop_now: Callable[[], bool], *, is_due: bool
) -> None:
    """Evaluate, and save what that gave, where a checkpoint is due or this is the best one so far."""
    config, progress = job.config, job.progress
    with job.evaluated_weights():
        metrics, metric = evaluate(
            job.model,
            job.eval_data,
            job.world,
            loss=job.parts.loss,
            infer=job.parts.infer,
            metric=job.parts.metric,
            # An `infer` may call the model once a picture; all ranks have to call a sharded one equally often.
            batch_size=1 if job.shards is not None and job.parts.infer is not None else config.eval_batch,
            num_workers=config.loader.num_workers,
            channels_last=config.channels_last,
            stop=stop_now,
            even=job.shards is not None,
        )
    name, better = job.parts.monitor
    if name not in metrics:
        raise ConfigError(f"the evaluation has no figure {name}", where="Parts.best", allowed=", ".join(metrics))
    progress.metrics, progress.evaluated_step = metrics, progress.step
    value, sign = metrics[name], 1.0 if better == "max" else -1.0
    # What is no number is never the best: no later figure could be better.
    is_best = not math.isnan(value) and (progress.best is None or sign * value > sign * progress.best["value"])
    if is_best:
        progress.best = {"step": progress.step, "metric": name, "value": value}
    reports.evaluation(job, metrics, metric)
    if is_due or is_best:
        saver.save(job)
