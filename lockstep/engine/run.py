"""One process's part of a run, from settings to `result.json`.

    lock the folder (rank 0), log       `_opened`
    build job, compare ranks            `_prepare` -> `make_job`
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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cluster import collectives
from lockstep.cluster.signals import StopSignal
from lockstep.cluster.world import World
from lockstep.config.document import to_yaml
from lockstep.config.given import flat
from lockstep.data.loader import lost_reader
from lockstep.engine.assemble import init_weights, make_job
from lockstep.engine.dataset_info import Recipe, build_from, dataset_info_for, write_dataset_info
from lockstep.engine.graceful_stop import StopFlag
from lockstep.engine.job import Job
from lockstep.engine.loop import train
from lockstep.engine.nonfinite import RollBack
from lockstep.engine.reports import Reports
from lockstep.engine.run_spec import RunSpec
from lockstep.engine.saving import CheckpointManager
from lockstep.engine.summary import finish, head
from lockstep.errors import LockstepError
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


def run(spec: RunSpec, recipe: Recipe, world: World, stop: StopSignal) -> int:
    """Train as one process of a world.

    Args:
        spec: The run, with its folder; equal on all ranks.
        recipe: Builds data, model, loss and metric.
        world: The processes of the run.
        stop: Set by a signal that asks this process to stop.

    Returns:
        0 if the run is complete, or 128 + the signal's number if the run was stopped after it saved.

    Raises:
        LockstepError: A failure that the user can act on.
    """
    folder = RunFolder(spec.run_folder)
    with _opened(folder, world), announced(spec.run_folder, world) as announce:
        origin = _origin(spec, folder)
        spec = spec if origin is None else _named_as_before(spec, origin)
        job, manager, notes, header = _prepare(spec, recipe, world, folder, origin)
        reports = Reports(job, folder)  # after `_prepare`: a refused resume must not touch the run's records
        reports.settings = flat(spec.diff)
        try:
            reports.block(*header)
            for note in notes:
                reports.notify(note)
            stop_flag = StopFlag(world, stop)
            # The detector starts after the model is built: ranks may differ much in how long that takes.
            with (
                HangDetector(world, spec.config.watch.hang_timeout_s, folder.path / "logs") as detector,
                job.compiling(),
            ):
                reports.work_of_ranks = detector.work
                # A rollback repeats the loop with the same objects; `restore` resets their state.
                while True:
                    try:
                        is_complete = train(job, manager, reports, stop_flag, stop_flag.is_requested)
                        break
                    except RollBack:
                        manager.restore(job, "auto", reports.notify)
            if not is_complete:
                reports.notify(
                    f"stopped after step {job.progress.step:,} and saved; resume with\n"
                    f"  lockstep train --run-dir {shlex.quote(str(folder.path))} --resume auto"
                )
                announce("stopped")
                return stop.exit_code or 143  # 128 + SIGTERM: the signal arrived on another rank
            waits = collectives.all_gather_object(world, (world.activity.work_s, world.activity.wait_s))
            # Collective: a sharded model's weights are gathered from all ranks before rank 0 writes them.
            weights = job.final_weights()
            if world.is_main:
                finish(spec, job, folder, reports, weights, waits)
            announce("done")
            return 0
        finally:
            reports.close()


def _prepare(
    spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder, origin: Path | None
) -> tuple[Job, CheckpointManager, list[object], tuple[str, dict[str, str]]]:
    """Assemble the job, restore or initialize it, and write the settings into the run folder.

    Args:
        spec: The run, with its folder.
        recipe: Builds data, model, loss and metric.
        world: The processes of the run.
        folder: The run folder, locked by rank 0.
        origin: The run folder that the run resumes from; None for a new run.

    Returns:
        The job, its checkpoint manager, notes for the user, and title and rows of the header.
    """
    config = spec.config
    # Only rank 0 needs the run folder's disk. An error ends the other ranks at their next collective.
    if world.is_main:
        check_same_run(folder, config, "auto" if spec.is_restart else spec.resume)
        if origin is not None and origin != folder.path:
            check_came_from(RunFolder(origin), config)
    with notice_if_slow("opening the data and building the model" if world.is_main else ""):
        dataset_info = dataset_info_for(recipe, config, world, origin)
        info_folder = origin or folder.path
        job = make_job(
            config, lambda: build_from(recipe, config, dataset_info, info_folder), world, is_restart=spec.is_restart
        )
        job.identity = identity(config, dataset_info)
        manager = CheckpointManager(folder, config.checkpoint, world)
        notes: list[object] = []
        # After a restart the run continues from its own checkpoints, even if it first resumed from another run's.
        restored = spec.is_restart and manager.restore(job, "auto", notes.append)
        if not restored and spec.resume != "never":
            restored = manager.restore(job, spec.resume, notes.append)
        started = {} if restored else init_weights(job, lambda: recipe.build(config, dataset_info))
        # Compared after the restore, since the fingerprint of the former run is in the checkpoint.
        if job.resumed_from is not None:
            before = job.resumed_from
            job.warnings += collectives.run_on_rank0(world, lambda: check_unchanged(before, job.fingerprint, config))
    job.note_world()
    if world.is_main:
        # A run that failed before its first checkpoint may start again with other settings.
        if not restored or not folder.config.exists():
            write_atomically(folder.path / "config.diff.yaml", to_yaml(spec.diff).encode())
            write_atomically(folder.config, to_yaml(plain_settings(config)).encode())
            write_dataset_info(folder, dataset_info)
            keep_recipe(folder, config.recipe)
        folder.write_json("environment.json", {"name": spec.name, **environment(world), "worlds": job.progress.worlds})
    return job, manager, [*notes, *job.warnings], head(spec, job, started)


@contextmanager
def _opened(folder: RunFolder, world: World) -> Iterator[None]:
    """Lock the run folder on rank 0, and write a log on every rank."""
    with rank_log(folder.path, world.rank):
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


def _origin(spec: RunSpec, folder: RunFolder) -> Path | None:
    """Return the run folder that this run resumes from, if it does."""
    if spec.resume not in ("never", "auto"):
        return Path(spec.resume).absolute().parent.parent
    is_resumed = spec.is_restart or spec.resume == "auto"
    return folder.path if is_resumed and steps(folder.checkpoints) else None


def _named_as_before(spec: RunSpec, origin: Path) -> RunSpec:
    """The specification with the name of the run that it resumes, since its source may be the run folder."""
    with suppress(LockstepError):
        name = RunFolder(origin).read_json("environment.json").get("name")
        return replace(spec, name=name) if isinstance(name, str) and name else spec
    return spec
