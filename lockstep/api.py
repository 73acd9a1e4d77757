"""Training as a function, and a world for a person's own loop."""

from __future__ import annotations

import locale
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cluster.env import ALONE, RankAssignment, read_assignment
from lockstep.cluster.signals import StopSignal, when_parent_dies
from lockstep.config.given import as_overrides, given_path
from lockstep.config.load import Loaded, load
from lockstep.config.process_range import ProcessRange, parse_range
from lockstep.config.schema import RunConfig
from lockstep.engine.run_spec import RunSpec, recipe_of
from lockstep.errors import CheckpointError, ConfigError, DataError, LaunchError, LockstepError, TrainError
from lockstep.launch import forkserver
from lockstep.launch.commands import LOCKSTEP, import_path
from lockstep.launch.start import (
    PRELOAD,
    LaunchOptions,
    default_procs,
    join_world,
    launch_here,
    rank_assignment,
    rendezvous_config,
    resume_from,
)
from lockstep.launch.stopped import Stopped
from lockstep.recipes.catalog import RecipeSpec, command_arguments, find
from lockstep.report.console import Console
from lockstep.report.log import log_path
from lockstep.report.starting import notice_if_slow

if TYPE_CHECKING:
    from lockstep.cluster.world import World

_CALLER = "LOCKSTEP_CALLER"  # the process in which `train` was called


@dataclass(frozen=True)
class Run:
    """A complete run.

    Attributes:
        folder: The run folder.
        metrics: Metrics of the last validation, by name.
        weights_sha256: SHA-256 of the final weights.
        result: The content of `result.json`.
    """

    folder: Path
    metrics: dict[str, float]
    weights_sha256: str
    result: dict[str, Any]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items() if "/" not in name)
        return f"Run({str(self.folder)!r}, {shown}, weights_sha256='{self.weights_sha256[:8]}…')"


def train(
    source: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    procs: int | str | None = None,
    run_dir: str | Path | None = None,
    resume: str = "never",
) -> Run:
    """Train as `lockstep train` does, in processes of its own, so it can be called from a notebook too.

    Args:
        source: A recipe, a preset, a YAML file or a recipe file.
        settings: Settings by name: `{"epochs": 3, "optim.lr": 0.1}` or nested.
        procs: Processes on this machine: 4, or "2:4".
        run_dir: The run folder; a new one under runs/ if left out.
        resume: never, auto, or a checkpoint's folder.

    Raises:
        LockstepError: The command's error text.
        Stopped: Ctrl-C, a kind of KeyboardInterrupt; the run has saved where it stood.
    """
    from lockstep.storage.run_folder import RunFolder, drop_empty, new_folder

    # A mistake is found before a folder is made for the run.
    found = find(str(source))
    overrides = as_overrides(settings)
    loaded = load(found.config_class, found.layers, overrides)
    if procs is not None:
        parse_range(str(procs), "procs")
    given = None if run_dir is None else given_path(run_dir, "run_dir")
    resume = resume_from(resume, given)
    folder = given or new_folder(found.name)
    command = [*LOCKSTEP, "train", *command_arguments(found, loaded.diff)]
    command += ["--run-dir", str(folder), "--resume", resume]
    if procs is not None:
        command += ["--procs", str(procs)]
    try:
        code, text = _run_command(command)
    finally:
        if given is None:
            drop_empty(folder)
    if code > 128 and not text:
        raise LaunchError(
            f"training was stopped by signal {code - 128}, and has saved",
            fix=f'to go on: lockstep.train({str(source)!r}, run_dir={str(folder)!r}, resume="auto")',
        )
    if code:
        raise _error_of(text, code)
    result = RunFolder(folder).read_json("result.json")
    return Run(folder, result["metrics"], result["weights_sha256"], result)


def _run_command(command: Sequence[str]) -> tuple[int, str]:
    """Run a command; its exit code and what it said on stderr.

    Raises:
        Stopped: Ctrl-C, after the command has ended.
    """
    is_asked = False
    with tempfile.TemporaryFile("w+", encoding=locale.getencoding(), errors="replace") as errors:
        # In a group of its own, so that Ctrl-C comes to this process alone, in a terminal as in a notebook.
        environ = {**os.environ, _CALLER: str(os.getpid()), **import_path()}
        child = subprocess.Popen(command, stderr=errors, process_group=0, env=environ)
        while child.returncode is None:
            try:
                child.wait()
            except KeyboardInterrupt:
                is_asked = True  # it saves and ends; at once if it is asked again
                child.send_signal(signal.SIGINT)
            except BaseException:
                child.kill()
                child.wait()
                raise
        errors.seek(0)
        text = errors.read().strip()
    if is_asked and child.returncode > 128:
        raise Stopped(child.returncode)
    return child.returncode, text


def _end_with_caller() -> None:
    """Where a `lockstep.train` has started this command: save and end once that process is gone.

    A kernel of a notebook that is started anew is killed, and would leave its training behind.
    """
    caller = os.environ.pop(_CALLER, None)
    if caller is not None and int(caller) == os.getppid():
        when_parent_dies(lambda: os.kill(os.getpid(), signal.SIGTERM))


def warn_before(folder: Path, config: RunConfig) -> None:
    """Print the warnings of the quick checks of `lockstep doctor`. Costs milliseconds."""
    from lockstep.doctor.finding import table
    from lockstep.doctor.machine import short

    needs_shared_memory = isinstance(config.loader.num_workers, int) and config.loader.num_workers > 0
    findings = short(folder, needs_shared_memory=needs_shared_memory)
    if found := [finding for finding in findings if finding.verdict in ("warning", "problem")]:
        Console(sys.stderr).table(table(found))
        Console(sys.stderr).say("For all checks: lockstep doctor")


def _error_of(text: str, code: int) -> LockstepError:
    kinds: list[type[LockstepError]] = [ConfigError, DataError, LaunchError, CheckpointError, TrainError]
    kind = next((kind for kind in kinds if kind.exit_code == code), LockstepError)
    return kind(text.removeprefix(f"{kind.kind}: ") or f"training ended with exit code {code}")


def train_command(
    found: RecipeSpec,
    loaded: Loaded[RunConfig],
    run_dir: Path | None,
    resume: str,
    options: LaunchOptions,
) -> int:
    """Join the world that another launcher started, or start one.

    Args:
        found: The recipe.
        loaded: Its resolved settings. No process reads the user's files again.
        run_dir: The run folder; None: a new one below runs/.
        resume: "never", "auto", or the folder of a checkpoint.
        options: Processes and machines.

    Returns:
        The exit code: 0, or 128 + a signal's number if the run was stopped after it saved.

    Raises:
        LockstepError: A failure that the user can act on.
    """
    started_at = time.time()
    _end_with_caller()
    config = loaded.config
    here = rank_assignment(options.procs, options.init, options.rank, options.world_size)
    spec = RunSpec(
        name=found.name,
        config=config,
        diff=loaded.diff,
        folder=run_dir,
        resume=resume_from(resume, run_dir),
        is_restart=False,
        started_at=started_at,
    )
    nodes = rendezvous_config(options, config, run_dir)
    default = 1 if here is not None else default_procs(config)
    procs = parse_range(str(options.procs), "--procs") if options.procs is not None else ProcessRange(default, default)
    if procs.most == 1 and nodes is None:
        return _train(found, spec, here or ALONE)

    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare(PRELOAD, config.num_threads)
    from lockstep.storage.run_folder import drop_empty, new_folder

    folder = run_dir or new_folder(found.name)
    text = replace(spec, folder=folder).to_json()
    log = log_path(folder, 0)
    with notice_if_slow(
        f"starting {procs} process{'es' if procs.most > 1 else ''}",
        lambda: log.exists() and log.stat().st_mtime > started_at,
    ):
        code = launch_here(procs, config, _train_worker, (text,), folder, options.max_restarts, nodes)
    if code and run_dir is None:
        drop_empty(folder)
    return code


def _train_worker(text: str) -> int:
    """Train as one of the launcher's processes; the environment says which rank this is."""
    found = find(recipe_of(text))
    return _train(found, RunSpec.from_json(text, found.config_class), read_assignment(os.environ) or ALONE)


def _train(found: RecipeSpec, spec: RunSpec, here: RankAssignment) -> int:
    """Train as one process of a world."""
    from lockstep.cluster import collectives
    from lockstep.engine.run import run
    from lockstep.storage.run_folder import drop_empty, new_folder

    is_new = spec.folder is None
    # Until all ranks have joined there is nothing to save, so a signal may end the process at once.
    with join_world(here, spec.config) as world, StopSignal() as stop:
        if world.restart and is_new:
            raise LaunchError(
                f"this is restart {world.restart} of the processes, and no run folder was given",
                fix="Give --run-dir where restarts are allowed. The run so far is the newest folder under runs/; "
                "resume it with --run-dir and --resume auto.",
            )
        folder = spec.folder or collectives.broadcast_object(world, new_folder(found.name) if world.is_main else None)
        assert folder is not None
        if here.started_by != "lockstep" and world.local_rank == 0:
            warn_before(folder, spec.config)
        try:
            return run(replace(spec, folder=folder, is_restart=world.restart > 0), found, world, stop)
        except LockstepError:
            if is_new:
                drop_empty(folder)
            raise


@contextmanager
def world(
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    device: str = "auto",
    backend: str = "auto",
    join_timeout_s: float = 300.0,
    timeout_s: float = 600.0,
) -> Iterator[World]:
    """The world that this process belongs to, for a loop of one's own.

    Args:
        init: Where the processes meet, with `rank` and `world_size`, as for `lockstep train --init`. Left out: the
            world that torchrun, srun, mpirun or the environment says, or this process alone.
        rank: This process's.
        world_size: How many there are.
        device: auto, cpu or cuda.
        backend: auto, gloo, nccl or mpi.
        join_timeout_s: How long to wait until all have come.
        timeout_s: The longest wait in a collective.

    Raises:
        LaunchError: The processes can't meet, or one is lost.
    """
    from lockstep.cluster.world import join

    here = read_assignment(os.environ, init, rank, world_size) or ALONE
    with join(here, device=device, backend=backend, join_timeout_s=join_timeout_s, timeout_s=timeout_s) as joined:
        yield joined
