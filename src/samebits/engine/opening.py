"""One process's part of a run, from settings to `result.json`.

    lock the folder (rank 0), log       `opened`
    compare settings                    `_open`
    build the job, compare ranks          `make_job`
    restore a checkpoint, or              `CheckpointManager.restore`
      initialize weights                  `init_weights`
    write the settings                    `_write_settings`
    train                               `loop.train`
    write weights, result.json          `OpenRun.finish`, if complete
    exit code                           `OpenRun.end`: 0, or 128 + signal

The order matters. Settings are compared before the model is built, so that a wrong resume fails early. Files of the run
folder are written only after a checkpoint was restored, so that a refused resume changes nothing.
"""

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from samebits.cluster import collectives
from samebits.cluster.signals import StopSignal
from samebits.cluster.world import World
from samebits.config.document import to_yaml
from samebits.config.given import flat
from samebits.data.loader import lost_reader
from samebits.engine.build import (
    FILE_NAME,
    DatasetInfo,
    Recipe,
    build_from,
    dataset_info_for,
    init_weights,
    make_job,
)
from samebits.engine.checkpoints import CheckpointManager
from samebits.engine.evaluate import try_metric
from samebits.engine.job import Job
from samebits.engine.output.recorder import recover_chain
from samebits.engine.output.reports import Reports
from samebits.engine.output.summary import finish, head
from samebits.engine.run_spec import RunSpec
from samebits.errors import SamebitsError
from samebits.provenance.fingerprint import environment
from samebits.provenance.identity import (
    check_came_from,
    check_same_run,
    check_unchanged,
    identity,
    plain_settings,
)
from samebits.provenance.record import STEPS_FILE, copy_steps
from samebits.report.console import Console
from samebits.report.log import log_path, notice_if_slow, rank_log
from samebits.storage.checkpoint import steps
from samebits.storage.run_folder import RunFolder, keep_recipe, write_atomically
from samebits.watchdog.detector import HangDetector

# Graceful stop: from a signal in one process to a stop of all ranks after the same step.


STORE_KEY = "samebits/stop"
# A poll is a round trip to the store in the training thread, so it must be rare compared with short steps.
POLL_S = 0.5


class StopFlag:
    """The stop flag of a step; rank 0's value travels to all ranks with the gradients.

    A signal may reach any rank, and not all of them. A rank other than 0 writes the request to the store, which rank 0
    polls. So every rank reads one decision from the same all-reduce and stops after the same step.
    """

    def __init__(self, job: Job, stop: StopSignal) -> None:
        self._job = job
        self._stop = stop
        self._reported_to: World | None = None
        self._polled_at = time.monotonic()

    def __call__(self, *, on_any_rank: bool = False) -> bool:
        """Return whether a stop was requested, as rank 0 sees it.

        `on_any_rank`: as this rank sees it, for use between steps, without an all-reduce.
        """
        world = self._job.world
        store = self._job.world.signed
        try:
            if self._stop.requested:
                if store is not None and not world.is_main and self._reported_to is not world:
                    store.put(STORE_KEY, world.rank)
                    self._reported_to = world
            elif (
                (on_any_rank or world.is_main)
                and store is not None
                and time.monotonic() - self._polled_at > POLL_S
            ):
                self._polled_at = time.monotonic()
                return store.get(STORE_KEY) is not None
        except DistError:
            # The launcher serves the store of a world whose members change. Where it has ended, all stop by themselves.
            if world.membership is None:
                raise
        return self._stop.requested


@dataclass
class OpenRun:
    """A run in one process."""

    spec: RunSpec  #: The run, under its own name.
    folder: RunFolder  #: The run folder, locked by rank 0.
    job: Job  #: The objects that training works on.
    manager: CheckpointManager  #: Writes checkpoints, on rank 0.
    reports: Reports  #: Reports to the user, on rank 0.
    stop: StopSignal  #: Set by a signal that requests a stop of this process.

    _has_written = False

    def __post_init__(self) -> None:
        self.job.stop_after = self.spec.stop_after
        #: Whether a stop was requested, as rank 0 sees it: it travels with a step's gradients.
        self.has_stop = StopFlag(self.job, self.stop)
        #: Whether a stop was requested, on any rank during a validation, whose results are then discarded.
        self.stop_now = partial(self.has_stop, on_any_rank=True)
        self._connect()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Find hangs of the present world. Later than its start: ranks may differ much in how long that takes."""
        job = self.job
        timeout_s = self.job.config.watch.hang_timeout_s
        with (
            HangDetector(job.world, timeout_s, self.folder.path / "logs") as detector,
            job.compiling(),
        ):
            self.reports.work_of_ranks = detector.work
            yield

    def finish(self) -> bool:
        """Write the result if the run is complete, and return whether it is. Called on all ranks."""
        job = self.job
        world = self.job.world
        is_complete = job.is_complete and job.is_evaluated()
        if is_complete:
            waits = collectives.all_gather_object(
                world, (world.activity.work_s, world.activity.wait_s)
            )
            if world.is_main and not self._has_written:
                finish(self.spec, job, self.folder, self.reports, waits)
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
        job = self.job
        before = self.reports
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


@contextmanager
def opened(spec: RunSpec, recipe: Recipe, world: World) -> Iterator[OpenRun]:
    """Open a run as one process of a world, and train it: `with opened(...) as run: code = run.end(train(run))`.

    Raises:
        SamebitsError: A failure that the user can act on.
    """
    folder = RunFolder(spec.run_folder)
    is_fixed = world.membership is None
    # The rank at the start: where worlds change, a process keeps its log, and a replacement that of the lost one.
    with (
        StopSignal() as stop,
        rank_log(folder.path, world.rank if is_fixed else world.assignment.rank),
    ):
        if world.is_main:
            folder.open()
        before = sys.unraisablehook
        sys.unraisablehook = _without_lost_reader
        try:
            address = world.assignment.init
            log = log_path(folder.path, world.rank)
            _announce(
                world,
                f" joined at {address}; rank 0 prints the progress, this rank logs to {log}",
            )
            run = _open(spec, recipe, world, folder, stop)
            try:
                yield run
                _announce(world, f": {run.reports.trackers.outcome}")
            finally:
                run.manager.close()
                run.reports.close()
        except Exception as error:
            # torch reports a killed DataLoader worker as a plain RuntimeError, maybe while another one is handled.
            if not isinstance(error, SamebitsError) and (lost := lost_reader(error)) is not None:
                raise lost from None
            raise
        finally:
            sys.unraisablehook = before
            # Emptied and unlocked also after an error: a process id
            # that stays in the lock counts as a killed run (ADR 43).
            folder.close()


def _open(
    spec: RunSpec, recipe: Recipe, world: World, folder: RunFolder, stop: StopSignal
) -> OpenRun:
    """Build the job, restore or initialize it, write the settings, and report the start.

    A replacement of a lost process only builds its job: it has no state of the run yet.

    Raises:
        SamebitsError: The settings, the data or a checkpoint cannot be used.
    """
    config = spec.config
    origin = folder.path if world.is_replacement else _origin(spec, folder)
    # Only rank 0 needs the run folder's disk. An error ends the other ranks at their next collective.
    if world.is_main:
        check_same_run(folder, config, "auto" if spec.is_restart else spec.resume)
        if origin is not None and origin != folder.path:
            check_came_from(RunFolder(origin), config)
    spec = _named(spec, origin)
    with notice_if_slow("opening the data and building the model" if world.is_main else ""):
        dataset_info = dataset_info_for(recipe, config, world, origin)
        job = make_job(
            config,
            lambda: build_from(recipe, config, dataset_info, origin or folder.path),
            world,
            is_restart=spec.is_restart or world.is_replacement,
        )
        job.identity = identity(config, dataset_info)
        manager = CheckpointManager(folder, config.checkpoint, world)
        if world.is_replacement:
            return OpenRun(spec, folder, job, manager, Reports(job, folder), stop)
        notes: list[object] = []
        # After a restart the run continues from its own checkpoints, even if it first resumed from another run's.
        restored = spec.is_restart and manager.restore(job, "auto", notes.append)
        if not restored and spec.resume != "never":
            restored = manager.restore(job, spec.resume, notes.append)
        started = {} if restored else init_weights(job)
        # Compared after the restore, since the fingerprint of the former run is in the checkpoint.
        if job.resumed_from is not None:
            former = job.resumed_from
            notes += collectives.run_on_rank0(
                world, lambda: check_unchanged(former, job.fingerprint, config)
            )
        if not spec.is_restart:
            try_metric(job)
    job.note_world()
    # Written by rank 0 after the restore, so that a refused resume changes no file.
    if world.is_main:
        if not restored or not folder.config.exists():
            _write_settings(spec, folder, dataset_info)
        is_copied = restored and config.record.steps and job.progress.chain
        if is_copied and origin is not None and origin != folder.path:
            # The record of the steps so far, for its chain to continue here.
            link = bytes.fromhex(job.progress.chain)
            copy_steps(origin / STEPS_FILE, folder.path / STEPS_FILE, job.progress.step, link)
        folder.write_json(
            "environment.json",
            {"name": spec.name, **environment(world), "worlds": job.progress.worlds},
        )
    reports = Reports(job, folder)
    reports.block(*head(spec, job, started))
    for note in notes:
        reports.notify(note)
    return OpenRun(spec, folder, job, manager, reports, stop)


def _origin(spec: RunSpec, folder: RunFolder) -> Path | None:
    """Return the run folder that this run resumes from, if it does."""
    if spec.resume not in ("never", "auto"):
        return Path(spec.resume).absolute().parent.parent
    is_resumed = spec.is_restart or spec.resume == "auto"
    return folder.path if is_resumed and steps(folder.checkpoints) else None


def _named(spec: RunSpec, origin: Path | None) -> RunSpec:
    """Return the specification with the name of the resumed run, since its source may be the run folder."""
    # The name is for display, so a damaged file must not prevent a resume.
    with suppress(SamebitsError):
        name = (
            None if origin is None else RunFolder(origin).read_json("environment.json").get("name")
        )
        return replace(spec, name=name) if isinstance(name, str) and name else spec
    return spec


def _write_settings(spec: RunSpec, folder: RunFolder, dataset_info: DatasetInfo) -> None:
    """Write the settings. A run that failed before its first checkpoint may start again with others."""
    write_atomically(folder.path / "config.diff.yaml", to_yaml(spec.diff).encode())
    write_atomically(folder.config, to_yaml(plain_settings(spec.config)).encode())
    if dataset_info:
        folder.write_json(FILE_NAME, dataset_info)
    else:  # a former start may have left one, which another recipe must not read
        (folder.path / FILE_NAME).unlink(missing_ok=True)
    keep_recipe(folder, spec.config.recipe)


def _without_lost_reader(unraisable: Any) -> None:
    """Leave out the traceback of torch's report of a killed worker inside of a destructor: the next read names it."""
    if lost_reader(unraisable.exc_value or Exception()) is None:
        sys.__unraisablehook__(unraisable)


def _announce(world: World, text: str) -> None:
    """Print a text on a rank that was started by hand, in its own terminal."""
    if not world.is_main and world.assignment.started_by == "command line":
        Console(sys.stdout).say(f"rank {world.rank} of {world.size}{text}")
