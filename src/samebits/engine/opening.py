"""One process's part of a run, from settings to `result.json`.

    lock the folder (rank 0), log       `opened`
    build job, compare ranks            `open_run` -> `prepare` -> `make_job`
    restore a checkpoint, or            `CheckpointManager.restore`
      initialize weights                `init_weights`
    train                               `loop.train`
    write weights, result.json          `OpenRun.finish`, if complete
    exit code                           `OpenRun.end`: 0, or 128 + signal

The order matters. Settings are compared before the model is built, so that a wrong resume fails early. Files of the run
folder are written only after a checkpoint was restored, so that a refused resume changes nothing.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from samebits.cluster import collectives
from samebits.cluster.signals import StopSignal
from samebits.cluster.world import World
from samebits.config.given import flat
from samebits.data.loader import lost_reader
from samebits.engine.checkpoints.saving import CheckpointManager
from samebits.engine.dataset_info import Recipe
from samebits.engine.graceful_stop import StopFlag
from samebits.engine.job import Job
from samebits.engine.output.recorder import recover_chain
from samebits.engine.output.reports import Reports
from samebits.engine.output.summary import finish
from samebits.engine.prepare import find_origin, keep_name, prepare, prepare_replacement
from samebits.engine.run_spec import RunSpec
from samebits.parallel.recheck import RecheckedReducer
from samebits.report.console import Console
from samebits.report.log import log_path, rank_log
from samebits.storage.run_folder import RunFolder
from samebits.watchdog.detector import HangDetector


@dataclass
class OpenRun:
    """A run in one process."""

    spec: RunSpec  #: The run, under its own name.
    folder: RunFolder  #: The run folder, locked by rank 0.
    job: Job  #: The objects that training works on.
    manager: CheckpointManager  #: Writes checkpoints, on rank 0.
    reports: Reports  #: Reports to the user, on rank 0.
    stop: StopSignal  #: Set by a signal that requests a stop of this process.
    header: tuple[str, dict[str, str]] | None = None  #: Title and rows of the header; None in a replacement.
    notes: Sequence[object] = ()  #: For the user, below the header.

    _has_written = False

    def __post_init__(self) -> None:
        self.job.stop_after = self.spec.stop_after
        #: Whether a stop was requested, as rank 0 sees it: it travels with a step's gradients.
        self.has_stop = StopFlag(self.job, self.stop)
        #: Whether a stop was requested, on any rank during a validation, whose results are then discarded.
        self.stop_now = self.has_stop.is_requested
        self._connect()

    def report_start(self) -> None:
        """Report the header and the notes."""
        if self.header is not None:
            self.reports.block(*self.header)
        for note in self.notes:
            self.reports.notify(note)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find hangs of the present world. Later than its start: ranks may differ much in how long that takes."""
        job, timeout_s = self.job, self.job.config.watch.hang_timeout_s
        with HangDetector(job.world, timeout_s, self.folder.path / "logs") as detector, job.compiling():
            self.reports.work_of_ranks = detector.work
            yield

    def finish(self) -> bool:
        """Write the result if the run is complete, and return whether it is. Called on all ranks."""
        job, world = self.job, self.job.world
        is_complete = job.is_complete and job.is_evaluated()
        if is_complete:
            waits = collectives.all_gather_object(world, (world.activity.work_s, world.activity.wait_s))
            # Collective: a sharded model's weights are gathered from all ranks before rank 0 writes them.
            weights = job.final_weights()
            if world.is_main and not self._has_written:
                finish(self.spec, job, self.folder, self.reports, weights, waits)
                self._has_written = True
        if world.membership is not None:
            # No rank leaves before rank 0 has written everything: another one would have to do it in its place.
            collectives.all_gather_object(world, is_complete)
        return is_complete

    def end(self, is_complete: bool) -> int:
        """Report how training has ended; return the exit code: 0 if the run is complete, or 128 + a signal's number."""
        job = self.job
        if not is_complete and not job.world.is_replacement:
            self.reports.notify(
                f"stopped after step {job.progress.step:,} and saved; resume with\n"
                f"  samebits train --run-dir {shlex.quote(str(self.folder.path))} --resume auto"
            )
        self.reports.trackers.outcome = "done" if is_complete else "stopped"
        if is_complete or (job.is_at_stop and not self.stop.requested):
            return 0
        return self.stop.exit_code or 143  # 128 + SIGTERM: the signal arrived on another rank

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


def open_run(spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder, stop: StopSignal) -> OpenRun:
    """Build a run in one process, for its first world or as a replacement, which has no state of the run yet.

    Raises:
        SamebitsError: The settings, the data or a checkpoint cannot be used.
    """
    if world.is_replacement:
        spec = keep_name(spec, folder.path)
        job, manager = prepare_replacement(spec, recipe, world, folder)
        return OpenRun(spec, folder, job, manager, Reports(job, folder), stop)
    origin = find_origin(spec, folder)
    # A resumed run keeps its name: its source may be the run folder, whose name would be shown instead.
    spec = spec if origin is None else keep_name(spec, origin)
    job, manager, notes, header = prepare(spec, recipe, world, folder, origin)
    # After `prepare`: a refused resume must not touch the run's records.
    return OpenRun(spec, folder, job, manager, Reports(job, folder), stop, header, notes)


@contextmanager
def opened(spec: RunSpec, recipe: Recipe, world: World) -> Iterator[OpenRun]:
    """Open a run as one process of a world, and train it: `with opened(...) as run: code = run.end(train(run))`.

    Raises:
        SamebitsError: A failure that the user can act on.
    """
    folder, is_fixed = RunFolder(spec.run_folder), world.membership is None
    # The rank at the start: where worlds change, a process keeps its log, and a replacement that of the lost one.
    with StopSignal() as stop, rank_log(folder.path, world.rank if is_fixed else world.assignment.rank):
        if world.is_main:
            folder.open()
        try:
            end = announce(folder, world)
            run = open_run(spec, recipe, world, folder, stop)
            try:
                run.report_start()
                yield run
                end(run.reports.trackers.outcome)
            finally:
                run.manager.close()
                run.reports.close()
        except RuntimeError as error:
            # torch reports a killed DataLoader worker as a plain RuntimeError.
            if (lost := lost_reader(error)) is not None:
                raise lost from None
            raise
        finally:
            # Emptied and unlocked also after an error: a process id
            # that stays in the lock counts as a killed run (ADR 43).
            folder.close()


def announce(folder: RunFolder, world: World) -> Callable[[str], None]:
    """Print on a rank that was started by hand, in its own terminal, that it joined; return what prints its end."""
    if world.is_main or world.assignment.started_by != "command line":
        return lambda _: None
    console, me = Console(sys.stdout), f"rank {world.rank} of {world.size}"
    log = log_path(folder.path, world.rank)
    console.say(f"{me} joined at {world.assignment.init}; rank 0 prints the progress, this rank logs to {log}")
    return lambda end: console.say(f"{me}: {end}")
