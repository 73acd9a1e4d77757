"""One process's part of a command that runs a recipe without a run folder: settings, world, parts, job, steps.

with opened(source, overrides) as bench:        load settings, join the world, read the dataset info
    job = bench.start()                         build, compare ranks, initialize weights
    loader, steps = job.open_loader(stop)
    result = advance(job, next(steps), loader)  a step as training makes it
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine.build import build_parts, dataset_info_for, init_weights, make_job
from samebits.engine.job import Job
from samebits.engine.parts import Parts
from samebits.engine.progress import StepFlags, StepResult
from samebits.engine.step import run_step
from samebits.launch.start import join_world
from samebits.recipes.catalog import RecipeSpec, find


@dataclass(frozen=True)
class Bench:
    """A recipe with its settings, in one process of a world."""

    recipe: RecipeSpec  #: The recipe.
    config: RunConfig  #: The settings.
    world: World  #: The processes.
    dataset_info: Mapping[str, Any]  #: What the recipe read from its data.

    def build(self) -> Parts:
        """Let the recipe build its parts."""
        return self.recipe.build(self.config, self.dataset_info)

    def parts(self) -> Parts:
        """Return the recipe's parts, checked and seeded as those of a run."""
        return build_parts(self.config, self.build)

    def job(self, *, is_restart: bool = False) -> Job:
        """Build a job, as `make_job` does; its weights are the recipe's random ones."""
        return make_job(self.config, self.build, self.world, is_restart=is_restart)

    def start(self) -> Job:
        """Build a job with the weights that training starts from."""
        job = self.job()
        init_weights(job, self.build)
        return job


@contextmanager
def opened(
    source: str, overrides: Sequence[str], here: RankAssignment | None = None
) -> Iterator[Bench]:
    """Load a recipe's settings and join the world as `here`; None: as in the environment."""
    recipe = find(source)
    config = recipe.load(overrides).config
    with joined(config, here) as world:
        yield Bench(recipe, config, world, dataset_info_for(recipe, config, world, None))


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
