"""One process's part of a run, from settings to `result.json`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cluster import collectives
from lockstep.cluster.signals import StopSignal
from lockstep.cluster.world import World
from lockstep.config.document import to_yaml
from lockstep.data.loader import lost_reader
from lockstep.engine.assemble import init_weights, make_job
from lockstep.engine.dataset_info import Recipe, dataset_info_for, write_dataset_info
from lockstep.engine.graceful_stop import StopFlag
from lockstep.engine.loop import train
from lockstep.engine.nonfinite import RollBack
from lockstep.engine.reports import Reports
from lockstep.engine.run_spec import RunSpec
from lockstep.engine.saving import CheckpointManager
from lockstep.engine.summary import finish, head
from lockstep.provenance.environment import environment
from lockstep.provenance.resumed import check_unchanged
from lockstep.provenance.run_identity import identity
from lockstep.provenance.same_run import check_came_from, check_same_run, plain_settings
from lockstep.report.console import Console
from lockstep.report.log import log_path, rank_log
from lockstep.report.starting import notice_if_slow
from lockstep.storage.checkpoint import steps
from lockstep.storage.recipe_copy import keep_recipe
from lockstep.storage.run_folder import RunFolder, write_atomically
from lockstep.watchdog.detector import HangDetector

if TYPE_CHECKING:
    pass


def run(request: RunSpec, recipe: Recipe, world: World, stop: StopSignal) -> int:
    """Train.

    Returns:
        0 if the run is complete, or 128 + the signal's number if it was asked to stop and has saved.

    Raises:
        LockstepError: Anything that a person can do something about.
    """
    folder = RunFolder(request.folder)
    with rank_log(request.folder, world.rank):
        if world.is_main:
            folder.open()
        try:
            with in_another_terminal(request.folder, world) as tell:
                code = _run(request, recipe, world, stop, folder)
                tell("done" if code == 0 else "stopped")
            return code
        except RuntimeError as error:
            if (lost := lost_reader(error)) is not None:
                raise lost from None
            raise
        finally:
            folder.close()


def _run(request: RunSpec, recipe: Recipe, world: World, stop: StopSignal, folder: RunFolder) -> int:
    config, origin = request.config, _origin(request, folder)
    if world.is_main:
        check_same_run(folder, config, "auto" if request.is_restart else request.resume)
        if origin is not None and origin != folder.path:
            check_came_from(RunFolder(origin), config)
    with notice_if_slow("getting ready: data and model" if world.is_main else ""):
        dataset_info = dataset_info_for(recipe, config, world, origin)
        job = make_job(config, lambda: recipe.build(config, dataset_info), world, is_restart=request.is_restart)
        job.identity = identity(config, dataset_info)
        saver = CheckpointManager(folder, config.checkpoint, world)
        passed_over: list[object] = []
        # After a restart the run goes on from what it saved, however it was begun.
        restored = request.is_restart and saver.restore(job, "auto", passed_over.append)
        if not restored and request.resume != "never":
            restored = saver.restore(job, request.resume, passed_over.append)
        started = {} if restored else init_weights(job, lambda: recipe.build(config, dataset_info))
        if job.resumed_from is not None:
            before = job.resumed_from
            job.warnings += collectives.run_on_rank0(world, lambda: check_unchanged(before, job.fingerprint, config))
    job.note_world()
    reports = Reports(job, folder)
    try:
        if world.is_main:
            # A run that died before its first checkpoint may begin anew with other settings.
            if not restored or not folder.config.exists():
                write_atomically(folder.path / "config.diff.yaml", to_yaml(request.diff).encode())
                write_atomically(folder.config, to_yaml(plain_settings(config)).encode())
                write_dataset_info(folder, dataset_info)
                keep_recipe(folder, config.recipe)
            folder.write_json("environment.json", {**environment(world), "worlds": job.progress.worlds})
        reports.block(*head(request, job, started))
        for note in [*passed_over, *job.warnings]:
            reports.say(note)
        stop_flag = StopFlag(world, stop)
        with HangDetector(world, config.watch.hang_timeout_s, folder.path / "logs") as heartbeat, job.compiling():
            reports.work_of_ranks = heartbeat.work
            while True:
                try:
                    is_complete = train(job, saver, reports, stop_flag, stop_flag.is_asked)
                    break
                except RollBack:
                    saver.restore(job, "auto", reports.say)
        if not is_complete:
            reports.say(
                f"stopped after step {job.progress.step:,} and saved; go on with\n"
                f"  lockstep train --run-dir {shlex.quote(str(folder.path))} --resume auto"
            )
            return stop.exit_code or 143
        waits = collectives.all_gather_object(world, (world.pulse.work_s, world.pulse.wait_s))
        weights = job.final_weights()
        if world.is_main:
            finish(request, job, folder, reports, weights, waits)
        return 0
    finally:
        reports.close()


@contextmanager
def in_another_terminal(folder: Path, world: World) -> Iterator[Callable[[str], None]]:
    """Let a rank that a person has started by hand beside rank 0's say that it has joined, and how it ended."""
    if world.is_main or world.placement.started_by != "command line":
        yield lambda _: None
        return
    console = Console(sys.stdout)
    me = f"rank {world.rank} of {world.size}"
    where = world.placement.init
    console.say(f"{me} joined at {where}; rank 0 tells how it goes, and {log_path(folder, world.rank)} has the rest")
    yield lambda end: console.say(f"{me}: {end}")


def _origin(request: RunSpec, folder: RunFolder) -> Path | None:
    """The run folder that this run goes on from, if it does."""
    if request.resume not in ("never", "auto"):
        return Path(request.resume).absolute().parent.parent
    goes_on = request.is_restart or request.resume == "auto"
    return folder.path if goes_on and steps(folder.checkpoints) else None
