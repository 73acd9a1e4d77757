"""One process of a command that runs a recipe without a run folder: its world, and steps as training makes them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine.job import Job
from samebits.engine.progress import StepFlags, StepResult
from samebits.engine.step import run_step
from samebits.launch.start import join_world


@contextmanager
def joined(config: RunConfig, here: RankAssignment | None = None) -> Iterator[World]:
    """Join the world of this process, or be alone in one."""
    with join_world(here or read_assignment(os.environ) or ALONE, config) as world:
        yield world


def advance(
    job: Job, step: Step, loader: Loader, flags: Callable[[], StepFlags] = lambda: StepFlags(0)
) -> StepResult:
    """Run a step and count it, as training does, without reports.

    Args:
        job: The job; its progress advances.
        flags: As for `run_step`.
    """
    result = run_step(job, step, loader, flags)
    if not result.is_finite and not result.is_overflow:
        job.progress.skipped.append(step.number)
    job.progress.step = step.number + 1
    return result
