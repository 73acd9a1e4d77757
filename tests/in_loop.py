"""Training by the loop alone: without console, hang detector and result files."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.job import Job
from samebits.engine.loop import train


def train_alone(
    job: Job,
    checkpoints: CheckpointManager,
    reports: Any,
    has_stop: Callable[[], bool] = lambda: False,
    stop_now: Callable[[], bool] = lambda: False,
) -> bool:
    """Train a job that is no run of the command. Returns whether it is complete."""
    run: Any = SimpleNamespace(
        job=job,
        manager=checkpoints,
        reports=reports,
        has_stop=has_stop,
        stop_now=stop_now,
        watched=nullcontext,
        finish=lambda: job.is_complete and job.is_evaluated(),
    )
    try:
        return train(run)
    finally:
        checkpoints.close()
