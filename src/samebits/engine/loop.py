"""The training loop, written out: step, report, save, validate, in this order.

Every rank runs the same loop. Decisions that only one rank can make (a signal arrived, an interval of seconds is over)
travel as `StepFlags` with the step's gradients, so all ranks branch the same way without a further collective:

    rank 0   STOP | COMPARE --+
    rank 1   0 ---------------+-- all-reduce of step n --> result.flags, equal on all ranks
    rank 2   0 ---------------+       compare? save? break? validate?
"""

from __future__ import annotations

from collections.abc import Callable

from samebits.cluster.views.membership import ViewEnded
from samebits.data.order import Step
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.evaluate import EvaluationStopped
from samebits.engine.job import Job
from samebits.engine.load_balance import LoadBalance
from samebits.engine.nonfinite import handle_nonfinite
from samebits.engine.output.reports import Reports
from samebits.engine.progress import StepFlags, StepResult
from samebits.engine.replica_check import ReplicaCheck
from samebits.engine.step import run_step
from samebits.engine.validation import validate


def train(
    job: Job,
    checkpoints: CheckpointManager,
    reports: Reports,
    has_stop: Callable[[], bool],
    stop_now: Callable[[], bool] = lambda: False,
) -> bool:
    """Train from the job's progress to its last step.

    Args:
        job: The run; its progress advances.
        checkpoints: Writes checkpoints, on rank 0.
        reports: Reports to the user, on rank 0.
        has_stop: Whether a stop was requested, as rank 0 sees it. It travels with the gradients, so that all ranks stop
            after the same step.
        stop_now: Whether a stop was requested, on any rank during a validation, whose results are then discarded.

    Returns:
        Whether the run is complete; False if it was stopped, with its position saved.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        TrainError: A step was not finite and watch.nonfinite=stop, or the ranks differ.
        CheckpointError: A checkpoint could not be written.
        RollBack: A step was not finite and watch.nonfinite=rollback.
    """
    replica_check, balance = ReplicaCheck(job), LoadBalance(job)
    can_change = (membership := job.world.membership) is not None
    loader, steps = job.open_loader()

    def flags() -> StepFlags:
        return StepFlags.of(
            stop=has_stop(),
            compare=replica_check.is_due(job),
            join=membership is not None and job.world.is_main and membership.has_changed,
            balance=balance.is_due(job),
        )

    try:
        reports.start(job)
        if can_change and job.last_result is not None and checkpoints.is_due(job) and not checkpoints.has_started(job):
            checkpoints.save(job)  # the world has changed between the last step and its checkpoint
        if job.is_evaluation_due() and not job.is_evaluated():  # it stopped between its last step and the validation
            end_epoch(job, checkpoints, reports, stop_now, is_due=True)
        while not job.is_complete and (step := next(steps, None)) is not None:  # complete: stop_early
            result = run_step(job, step, loader, flags)
            if not result.is_finite and not result.is_overflow:
                handle_nonfinite(job, step, checkpoints, reports)
            complete_step(job, step, result, reports)
            if StepFlags.COMPARE in result.flags:
                replica_check.compare(job)  # before a checkpoint could store the difference
            is_stopping = StepFlags.STOP in result.flags
            is_due = is_stopping or job.is_complete or job.is_at_stop or checkpoints.is_due(job)
            if is_due:
                checkpoints.save(job)  # before the validation, which may take long or fail
            if is_stopping:
                break
            if job.is_evaluation_due():
                end_epoch(job, checkpoints, reports, stop_now, is_due=is_due)
            if is_due or job.is_evaluation_due():
                reports.resume(job)
            if StepFlags.JOIN in result.flags:
                raise ViewEnded("a new process joins")
            if StepFlags.BALANCE in result.flags and (text := balance.update(job)):
                reports.notify(text)
                loader, steps = balance.reopen(job)
    except EvaluationStopped:
        # Between steps, no gradients carry flags. `evaluate` raises this on all ranks if one of them stops.
        checkpoints.save(job)
    finally:
        loader.close()
        if not can_change:  # otherwise a checkpoint is written on while the world changes
            checkpoints.close()
    checkpoints.wait()  # an error of the last checkpoint is raised here
    return job.is_complete and job.is_evaluated()


def complete_step(job: Job, step: Step, result: StepResult, reports: Reports) -> None:
    """Count and report a step that was applied. Calls no other rank, except with `record.content`.

    Args:
        job: The run; its progress advances.
        step: The step's plan.
        result: Its result.
        reports: Reports to the user, on rank 0.
    """
    job.progress.step = step.number + 1
    # Progress advances for skipped steps too: the sample order depends on the step number only.
    job.progress.num_samples += step.num_samples if result.is_finite else 0
    reports.step(job, step, result)


def end_epoch(
    job: Job, checkpoints: CheckpointManager, reports: Reports, stop_now: Callable[[], bool], *, is_due: bool
) -> None:
    """Validate, and save the result if a checkpoint is due or this is the best validation so far.

    Args:
        job: The run.
        checkpoints: Writes checkpoints, on rank 0.
        reports: Reports to the user, on rank 0.
        stop_now: Whether a stop was requested.
        is_due: Whether a checkpoint of this step is due, even if the validation is not the best one.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        EvaluationStopped: A stop was requested.
    """
    job.begin_evaluation()
    metrics, metric, is_best = validate(job, stop_now)
    reports.evaluation(job, metrics, metric)
    if is_due or is_best or job.progress.has_stopped_early:
        checkpoints.save(job)
