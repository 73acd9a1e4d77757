"""Runs for the trials of `samebits verify`: trained, resumed and verified in this process or the ranks of a pool."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pydantic import TypeAdapter

from samebits.cluster.env import ALONE
from samebits.cluster.world import World
from samebits.config.schema import RunConfig
from samebits.data.loader import Loader
from samebits.data.order import Step
from samebits.engine import loop
from samebits.engine.job import Job
from samebits.engine.opening import opened
from samebits.engine.output.reports import Reports
from samebits.engine.progress import StepResult
from samebits.engine.run_spec import RunSpec
from samebits.engine.step import run_step
from samebits.inference.trained_model import TrainedModel
from samebits.launch.start import join_world
from samebits.recipes.catalog import RecipeSpec, find
from samebits.recipes.trust import trust
from samebits.replay.segments import Plan, Replay, replay_on
from samebits.replay.verify import Request, Verdict, verify

TINY = Path(__file__).resolve().parents[2] / "tests" / "e2e" / "tiny_recipe.py"
# 20 steps in 5 segments, with momentum, a schedule, weight decay and clipping; all in a quarter of a second.
SETTINGS = (
    "epochs=4", "checkpoint.every=4 steps", "checkpoint.keep=1", "checkpoint.keep_every=4 steps", "optim.clip_norm=1.0",
    "optim.weight_decay=0.01", "optim.schedule=cosine", "report.tensorboard=false", "device=cpu",
)  # fmt: skip
NUM_STEPS, KEPT, PER_EPOCH = 20, 4, 5

# Called in place of `run_step`, which it may call: (job, step, loader, flag) -> the step's result.
Cheat = Callable[[Job, Step, Loader, float], StepResult]


class Killed(BaseException):
    """The process of a trial ends here, as if it were killed: nothing is saved."""


def settings(overrides: tuple[str, ...] = ()) -> tuple[RecipeSpec, RunConfig]:
    """Return the tiny recipe and its settings."""
    found = find(str(TINY))
    return found, found.load([*SETTINGS, *overrides]).config


def prepare_process() -> None:
    """Trust the tiny recipe, as `samebits train` would; XDG_CONFIG_HOME should be a temporary folder."""
    trust(TINY)


def train_in(
    world: World,
    folder: Path,
    overrides: tuple[str, ...] = (),
    cheat: Cheat = run_step,
    resume: str = "never",
) -> int:
    """Train the tiny recipe on a world that this process has joined; return the exit code."""
    found, config = settings(overrides)
    spec = RunSpec("tiny", config, {}, folder, resume, False, time.time())
    with (
        patch.object(loop, "run_step", cheat),
        patch.object(Reports, "_draw", lambda *_: None),
        opened(spec, found, world) as run,
    ):
        return run.end(loop.train(run))


def killed_before(stop: int) -> Cheat:
    """Return a step that ends the process of a trial before step `stop`."""

    def killed(job: Job, step: Step, loader: Loader, flag: float) -> StepResult:
        if step.number == stop:
            raise Killed
        return run_step(job, step, loader, flag)

    return killed


def train_until(
    world: World, folder: Path, overrides: tuple[str, ...] = (), stop_at: int = NUM_STEPS, resume: str = "never"
) -> bool:
    """Train until the end, or until the processes are killed after step `stop_at`. Returns whether it is complete."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return train_in(world, folder, overrides, killed_before(stop_at), resume) == 0
        except Killed:
            return False


@contextlib.contextmanager
def alone() -> Iterator[World]:
    """Join a world of one process."""
    with join_world(ALONE, settings()[1]) as world:
        yield world


def train(folder: Path, overrides: tuple[str, ...] = (), cheat: Cheat = run_step, resume: str = "never") -> None:
    """Train the tiny recipe in this process."""
    with alone() as world, contextlib.redirect_stdout(io.StringIO()):
        assert train_in(world, folder, overrides, cheat, resume) == 0


def verified(folder: Path, **request: Any) -> Verdict:
    """Verify a run in this process; `request` as for `Request`, by default every step."""
    with contextlib.redirect_stderr(io.StringIO()):
        return verify(Request(folder, **request))


def verify_in(world: World, folder: Path, request: dict[str, Any]) -> str:
    """Verify a run on the ranks of a pool, which all take the same decisions; return the verdict of rank 0 as JSON."""

    def replay_here(plan: Plan, _config: RunConfig, _procs: int) -> Replay:
        model = TrainedModel(plan.run, plan.overrides)
        return replay_on(plan, model, *model.settings(), world)

    with contextlib.redirect_stderr(io.StringIO()):
        verdict = verify(Request(folder, **request), run_replay=replay_here)
    return verdict.to_json() if world.is_main else ""


def verdict_in(text: str) -> Verdict:
    """Return the verdict in a text of `verify_in`."""
    plain = {name: value for name, value in json.loads(text).items() if name not in ("is_verified", "share")}
    return TypeAdapter(Verdict).validate_python(plain)
