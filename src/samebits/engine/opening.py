"""The objects of a run in one process: built at its start, in a replacement, and by a new rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.cluster.world import World
from samebits.config.given import flat
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.dataset_info import Recipe
from samebits.engine.job import Job
from samebits.engine.output.recorder import recover_chain
from samebits.engine.output.reports import Reports
from samebits.engine.prepare import find_origin, keep_name, prepare, prepare_replacement
from samebits.engine.run_spec import RunSpec
from samebits.parallel.recheck import RecheckedReducer
from samebits.storage.run_folder import RunFolder


@dataclass
class OpenRun:
    """A run in one process."""

    spec: RunSpec  #: The run, under its own name.
    folder: RunFolder  #: The run folder, locked by rank 0.
    job: Job  #: The objects that training works on.
    manager: CheckpointManager  #: Writes checkpoints, on rank 0.
    reports: Reports  #: Reports to the user, on rank 0.
    header: tuple[str, dict[str, str]] | None = None  #: Title and rows of the header; None in a replacement.
    notes: Sequence[object] = ()  #: For the user, below the header.

    def __post_init__(self) -> None:
        self.job.stop_after = self.spec.stop_after
        self._connect()

    def report_start(self) -> None:
        """Report the header and the notes."""
        if self.header is not None:
            self.reports.block(*self.header)
        for note in self.notes:
            self.reports.notify(note)

    def take_over(self) -> None:
        """Continue the work of a rank 0 that was lost: the run folder, its records, its checkpoints and the console."""
        # It may still run: a machine that is only slow counts as lost, and learns later that it has to end its
        # processes. The lock of one that lost its power stays until the file server notices. The other ranks wait as
        # long for their next message.
        self.folder.open(wait_s=self.job.config.cluster.timeout_s)
        job, before = self.job, self.reports
        # Only rank 0 computes the chain, so a new rank 0 finds it in the record on disk.
        job.progress.chain = recover_chain(job, self.folder.path)
        self.manager = CheckpointManager(self.folder, job.config.checkpoint, job.world)
        self.manager.take_over()
        before.close()
        self.reports = Reports(job, self.folder)
        self._connect()
        self.reports.take_over(before)

    def _connect(self) -> None:
        """Let the parts report."""
        self.reports.settings = flat(self.spec.diff)
        self.manager.notify = self.reports.checkpoint
        if isinstance(self.job.reducer, RecheckedReducer):
            self.job.reducer.notify = self.reports.notify


def open_run(spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder) -> OpenRun:
    """Build a run in one process.

    Args:
        spec: The run, with its folder.
        recipe: Builds data, model, loss and metric.
        world: The first world, or that of a replacement, which has no state of the run yet.
        folder: The run folder, locked by rank 0.

    Raises:
        SamebitsError: The settings, the data or a checkpoint cannot be used.
    """
    if world.is_replacement:
        spec = keep_name(spec, folder.path)
        job, manager = prepare_replacement(spec, recipe, world, folder)
        return OpenRun(spec, folder, job, manager, Reports(job, folder))
    origin = find_origin(spec, folder)
    # A resumed run keeps its name: its source may be the run folder, whose name would be shown instead.
    spec = spec if origin is None else keep_name(spec, origin)
    job, manager, notes, header = prepare(spec, recipe, world, folder, origin)
    # After `prepare`: a refused resume must not touch the run's records.
    return OpenRun(spec, folder, job, manager, Reports(job, folder), header, notes)
