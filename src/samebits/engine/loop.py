"""The training loop, written out: step, report, save, validate, in this order.

Every rank runs the same loop. Decisions that only one rank can make (a signal arrived, an interval of seconds is over)
travel as `StepFlags` with the step's gradients, so all ranks branch the same way without a further collective:

    rank 0   STOP | COMPARE --+
    rank 1   0 ---------------+-- all-reduce of step n --> result.flags, equal on all ranks
    rank 2   0 ---------------+       compare? save? break? validate?

The loop starts again after a rollback, and in a world that has changed (`cluster.recovery=in_step`).
"""

from contextlib import closing
from functools import partial

from samebits.cluster.views.membership import ViewEnded
from samebits.engine.evaluate import EvaluationStopped, validate
from samebits.engine.forward import RollBack, handle_nonfinite
from samebits.engine.in_step import InStepRun
from samebits.engine.opening import OpenRun
from samebits.engine.progress import StepFlags
from samebits.engine.replica_check import ReplicaCheck
from samebits.engine.step import run_step


def train(run: OpenRun) -> bool:
    """Train as one process to the last step: the engine's entry; return whether the run is complete, and not stopped.

    Raises:
        ConfigError: The validation has no metric of the name in `Parts.monitor`.
        TrainError: A step was not finite and watch.nonfinite=stop, or the ranks differ.
        CheckpointError: A checkpoint could not be written.
    """
    job = run.job
    recovery = InStepRun(run)
    if not recovery.join():
        return recovery.is_complete
    while True:
        # others, once this process has become rank 0
        checkpoints = run.manager
        reports = run.reports
        replica_check = ReplicaCheck(job)
        try:
            with run.watched(), closing(job):
                loader, steps = job.open_loader()
                is_stopping = _begin(run)
                # It may be complete before its last step, by `stop_early`.
                while (
                    not (is_stopping or job.is_complete) and (step := next(steps, None)) is not None
                ):
                    result = run_step(job, step, loader, partial(_decide, run, replica_check))
                    if not result.is_finite and not result.is_overflow:
                        handle_nonfinite(job, step, checkpoints, reports)
                    job.count_step(step, result)
                    reports.step(job, step, result)
                    if StepFlags.COMPARE in result.flags:
                        replica_check.compare(job)  # before a checkpoint could store the difference
                    is_stopping = StepFlags.STOP in result.flags
                    is_due = (
                        is_stopping or job.is_complete or job.is_at_stop or checkpoints.is_due(job)
                    )
                    if is_due:
                        checkpoints.save(job)  # before the validation, which may take long or fail
                    if job.is_evaluation_due() and not is_stopping:
                        is_stopping = _validate(run, is_due=is_due)
                    if is_due or job.is_evaluation_due():
                        reports.resume(job)
                    if is_stopping:
                        break
                    if StepFlags.JOIN in result.flags:
                        raise ViewEnded("a new process joins")
            checkpoints.wait()  # an error of the last checkpoint is raised here
            return run.finish()
        except RollBack:
            continue  # the last checkpoint is restored
        except RuntimeError as error:
            if not recovery.rejoin(error):
                return recovery.is_complete


def _decide(run: OpenRun, replica_check: ReplicaCheck) -> StepFlags:
    """Return this rank's decisions; those of rank 0 count."""
    job = run.job
    membership = run.job.world.membership
    is_joined = membership is not None and job.world.is_main and membership.has_changed
    return StepFlags(
        run.has_stop() * StepFlags.STOP
        | replica_check.is_due(job) * StepFlags.COMPARE
        | is_joined * StepFlags.JOIN
    )


def _begin(run: OpenRun) -> bool:
    """Report the start, and do what was still due after the last step; return whether a stop was requested."""
    job = run.job
    run.reports.start(job)
    if job.world.membership is not None and job.last_result is not None:  # the world has changed
        run.manager.save_if_due(job)
    # The run stopped between its last step and the validation.
    return job.is_evaluation_due() and not job.is_evaluated() and _validate(run, is_due=True)


def _validate(run: OpenRun, *, is_due: bool) -> bool:
    """Validate, and save the result if a checkpoint is due or this is the best validation so far.

    `is_due`: a checkpoint of this step is.

    Returns:
        Whether a stop was requested meanwhile. The validation is then repeated when the run resumes.
    """
    job = run.job
    job.begin_evaluation()
    try:
        metrics, metric, is_best = validate(job, run.stop_now)
    except EvaluationStopped:
        # Between steps, no gradients carry flags. `evaluate` raises this on all ranks if one of them stops.
        run.manager.save(job)
        return True
    run.reports.evaluation(job, metrics, metric)
    if is_due or is_best or job.progress.has_stopped_early:
        run.manager.save(job)
    return False
