"""One process's part of a run, from settings to `result.json`.

    lock the folder (rank 0), log       `_opened`
    build job, compare ranks            `open_run` -> `prepare` -> `make_job`
    restore a checkpoint, or            `CheckpointManager.restore`
      initialize weights                `init_weights`
    train <-- RollBack --+              `train`; a step that is not finite can restart from the last checkpoint
      |------------------+
    write weights, result.json          `finish`, if complete; otherwise exit with 128 + signal

The order matters. Settings are compared before the model is built, so that a wrong resume fails early. Files of the run
folder are written only after a checkpoint was restored, so that a refused resume changes nothing.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from samebits.cluster import collectives
from samebits.cluster.signals import StopSignal
from samebits.cluster.world import World
from samebits.data.loader import lost_reader
from samebits.engine.dataset_info import Recipe
from samebits.engine.graceful_stop import StopFlag
from samebits.engine.in_step.in_step_run import InStepRun
from samebits.engine.loop import train
from samebits.engine.nonfinite import RollBack
from samebits.engine.opening import OpenRun, open_run
from samebits.engine.output.summary import finish
from samebits.engine.run_spec import RunSpec
from samebits.report.console import Console
from samebits.report.log import log_path, rank_log
from samebits.storage.run_folder import RunFolder
from samebits.watchdog.detector import HangDetector


def run(spec: RunSpec, recipe: Recipe, world: World, stop: StopSignal) -> int:
    """Train as one process of a world.

    Args:
        spec: The run, with its folder; equal on all ranks.
        recipe: Builds data, model, loss and metric.
        world: The processes of the run.
        stop: Set by a signal that requests a stop of this process.

    Returns:
        0 if the run is complete, or 128 + the signal's number if the run was stopped after it saved.

    Raises:
        SamebitsError: A failure that the user can act on.
    """
    folder = RunFolder(spec.run_folder)
    with _opened(folder, world), announced(spec.run_folder, world) as announce:
        opened = open_run(spec, recipe, world, folder)
        try:
            opened.report_start()
            is_complete = _train(opened, stop) if world.membership is None else InStepRun(opened, stop).run()
            job = opened.job
            if not is_complete and not job.world.is_replacement:
                opened.reports.notify(_stopped(job.progress.step, folder))
            opened.reports.trackers.outcome = "done" if is_complete else "stopped"
            announce(opened.reports.trackers.outcome)
            if is_complete or (job.is_at_stop and not stop.requested):
                return 0
            return stop.exit_code or 143  # 128 + SIGTERM: the signal arrived on another rank
        finally:
            opened.reports.close()


def _train(opened: OpenRun, stop: StopSignal) -> bool:
    """Train in a world that stays; return whether the run is complete, or was stopped and has saved."""
    job, reports, world = opened.job, opened.reports, opened.job.world
    stop_flag = StopFlag(world, stop)
    timeout_s = job.config.watch.hang_timeout_s
    # The detector starts after the model is built: ranks may differ much in how long that takes.
    with HangDetector(world, timeout_s, opened.folder.path / "logs") as detector, job.compiling():
        reports.waits.work_of_ranks = detector.work
        # A rollback repeats the loop with the same objects; `restore` resets their state.
        while True:
            try:
                is_complete = train(job, opened.manager, reports, stop_flag, stop_flag.is_requested)
                break
            except RollBack:
                opened.manager.restore(job, "auto", reports.notify)
    if is_complete:
        waits = collectives.all_gather_object(world, (world.activity.work_s, world.activity.wait_s))
        # Collective: a sharded model's weights are gathered from all ranks before rank 0 writes them.
        weights = job.final_weights()
        if world.is_main:
            finish(opened.spec, job, opened.folder, reports, weights, waits)
    return is_complete


def _stopped(step: int, folder: RunFolder) -> str:
    return (
        f"stopped after step {step:,} and saved; resume with\n"
        f"  samebits train --run-dir {shlex.quote(str(folder.path))} --resume auto"
    )


@contextmanager
def _opened(folder: RunFolder, world: World) -> Iterator[None]:
    """Lock the run folder on rank 0, and write a log on every rank."""
    # The rank at the start: where worlds change, a process keeps its log, and a replacement that of the lost one.
    with rank_log(folder.path, world.rank if world.membership is None else world.assignment.rank):
        if world.is_main:
            folder.open()
        try:
            yield
        except RuntimeError as error:
            # torch reports a killed DataLoader worker as a plain RuntimeError.
            if (lost := lost_reader(error)) is not None:
                raise lost from None
            raise
        finally:
            # Emptied and unlocked also after an error: a process id
            # that stays in the lock counts as a killed run (ADR 43).
            folder.close()


@contextmanager
def announced(folder: Path, world: World) -> Iterator[Callable[[str], None]]:
    """Print on a rank that was started by hand, in a terminal of its own, that it joined and how it ended.

    Yields:
        A function that prints how the rank ended.
    """
    if world.is_main or world.assignment.started_by != "command line":
        yield lambda _: None
        return
    console = Console(sys.stdout)
    me = f"rank {world.rank} of {world.size}"
    where = world.assignment.init
    console.say(f"{me} joined at {where}; rank 0 prints the progress, this rank logs to {log_path(folder, world.rank)}")
    yield lambda end: console.say(f"{me}: {end}")
