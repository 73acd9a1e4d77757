"""The training loop, written out: step, report, save, validate, in this order.

Every rank runs the same loop. Decisions that only one rank can make (a signal arrived, an interval of seconds is over)
travel as one number with the step's gradients, so all ranks branch the same way without a further collective:

    rank 0   flag = STOP | COMPARE --+
    rank 1   flag = 0 ---------------+-- all-reduce of step n --> result.flag, equal on all ranks
    rank 2   flag = 0 ---------------+       compare? save? break? validate?
"""

from __future__ import annotations

from collections.abc import Callable

from samebits.cluster.epochs.membership import EpochEnded
from samebits.data.order import Step
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.evaluate import EvaluationStopped
from samebits.engine.job import Job
from samebits.engine.load_balance import LoadBalance
from samebits.engine.nonfinite import handle_nonfinite
from samebits.engine.output.reports import Reports
from samebits.engine.progress import StepResult
from samebits.engine.replica_check import ReplicaCheck
from samebits.engine.step import run_step
from samebits.engine.validation import validate

StopNow = Callable[[], bool]
STOP, COMPARE, JOIN, BALANCE = 1, 2, 4, 8  # bits of the flag that rank 0 sends to all ranks with a step's gradients


def train(
    job: Job,
    saver: CheckpointManager,
    reports: Reports,
    stop_flag: Callable[[], float],
    stop_now: StopNow = lambda: False,
) -> bool:
    """Train from the job's progress to its last step.

    Args:
        job: The run; its progress advances.
        saver: Writes checkpoints, on rank 0.
        reports: Reports to the user, on rank 0.
        stop_flag: Returns 1 on rank 0 once a stop was requested. It travels with the gradients, so that all ranks stop
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
    can_change = job.world.membership is not None
    loader, steps = job.open_loader()

    def flag() -> float:
        what = STOP * stop_flag() + COMPARE * replica_check.is_due(job) + JOIN * is_joining(job)
        return what + BALANCE * balance.is_due(job)

    try:
        reports.start(job)
        if can_change and job.last_result is not None and saver.is_due(job) and not saver.has_started(job):
            saver.save(job)  # the world has changed between the last step and its checkpoint
        if job.is_evaluation_due() and not job.is_evaluated():  # it stopped between its last step and the validation
            end_epoch(job, saver, reports, stop_now, is_due=True)
        while not job.is_complete and (step := next(steps, None)) is not None:  # complete: stop_early
            result = run_step(job, step, loader, flag)
            if not result.is_finite and not result.is_overflow:
                handle_nonfinite(job, step, saver, reports)
            complete_step(job, step, result, reports)
            if int(result.flag) & COMPARE:
                replica_check.compare(job)  # before a checkpoint could store the difference
            is_stopping = bool(int(result.flag) & STOP)
            is_due = is_stopping or job.is_complete or job.is_at_stop or saver.is_due(job)
            if is_due:
                saver.save(job)  # before the validation, which may take long or fail
            if is_stopping:
                break
            if job.is_evaluation_due():
                end_epoch(job, saver, reports, stop_now, is_due=is_due)
            if is_due or job.is_evaluation_due():
                reports.resume(job)
            if int(result.flag) & JOIN:
                raise EpochEnded("a new process joins")
            if int(result.flag) & BALANCE and (text := balance.update(job)):
                reports.notify(text)
                loader, steps = balance.reopen(job)
    except EvaluationStopped:
        # Between steps, no gradients carry the flag. `evaluate` raises this on all ranks if one of them stops.
        saver.save(job)
    finally:
        loader.close()
        if not can_change:  # otherwise a checkpoint is written on while the world changes
            saver.close()
    saver.wait()  # an error of the last checkpoint is raised here
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


def is_joining(job: Job) -> bool:
    """Return whether a new process waits to join, as rank 0 sees it."""
    return job.world.is_main and job.world.membership is not None and job.world.membership.has_changed


def end_epoch(job: Job, saver: CheckpointManager, reports: Reports, stop_now: StopNow, *, is_due: bool) -> None:
    """Validate, and save the result if a checkpoint is due or this is the best validation so far.

    Args:
        job: The run.
        saver: Writes checkpoints, on rank 0.
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
        saver.save(job)
