"""The objects of a run in one process: built at its start, in a replacement, and by a new rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.cluster.world import World
from lockstep.config.given import flat
from lockstep.engine.dataset_info import Recipe
from lockstep.engine.job import Job
from lockstep.engine.output.recorder import recover_chain
from lockstep.engine.output.reports import Reports
from lockstep.engine.prepare import find_origin, keep_name, prepare, prepare_replacement
from lockstep.engine.run_spec import RunSpec
from lockstep.engine.saving import CheckpointManager
from lockstep.storage.run_folder import RunFolder


@dataclass
class OpenRun:
    """A run in one process.

    Attributes:
        spec: The run, under its own name.
        folder: The run folder, locked by rank 0.
        job: The objects that training works on.
        manager: Writes checkpoints, on rank 0.
        reports: Reports to the user, on rank 0.
    """

    spec: RunSpec
    folder: RunFolder
    job: Job
    manager: CheckpointManager
    reports: Reports

    def take_over(self) -> None:
        """Continue the work of a rank 0 that was lost: the run folder, its records, its checkpoints and the console."""
        self.folder.open()
        job, before = self.job, self.reports
        job.progress.chain = recover_chain(job, self.folder.path)
        self.manager = CheckpointManager(self.folder, job.config.checkpoint, job.world)
        self.manager.take_over()
        before.close()
        self.reports = _reports(self.spec, job, self.folder)
        self.reports.take_over(before)


def open_run(spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder) -> OpenRun:
    """Build a run in one process, and report its header.

    Args:
        spec: The run, with its folder.
        recipe: Builds data, model, loss and metric.
        world: The first world, or that of a replacement, which has no state of the run yet.
        folder: The run folder, locked by rank 0.
    """
    if world.is_replacement:
        spec = keep_name(spec, folder.path)
        job, manager = prepare_replacement(spec, recipe, world, folder)
        return OpenRun(spec, folder, job, manager, _reports(spec, job, folder))
    origin = find_origin(spec, folder)
    spec = spec if origin is None else keep_name(spec, origin)
    job, manager, notes, header = prepare(spec, recipe, world, folder, origin)
    reports = _reports(spec, job, folder)
    reports.block(*header)
    for note in notes:
        reports.notify(note)
    return OpenRun(spec, folder, job, manager, reports)


def _reports(spec: RunSpec, job: Job, folder: RunFolder) -> Reports:
    reports = Reports(job, folder)
    reports.settings = flat(spec.diff)
    return reports
