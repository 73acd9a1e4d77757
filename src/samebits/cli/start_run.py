"""Start a run whose settings are resolved: join the world of another launcher, or launch one.

```
train_command    check what can be known without torch
  |-- another launcher has started this process, or one process suffices -> train here
  `-- otherwise: fork server -> workers, each of which trains as one rank
```
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.config.load import Loaded
from samebits.config.schema import RunConfig
from samebits.doctor.check_result import table
from samebits.engine.run_spec import RunSpec, recipe_of
from samebits.errors import LaunchError, SamebitsError
from samebits.extras import require_recipe
from samebits.launch import forkserver
from samebits.launch.start import (
    LaunchOptions,
    check_device,
    default_procs,
    join_world,
    launch_here,
    rank_assignment,
    rendezvous_config,
    resume_from,
)
from samebits.process_range import parse_range
from samebits.recipes.catalog import RecipeSpec, find
from samebits.report.console import Console
from samebits.report.log import log_path, notice_if_slow

if TYPE_CHECKING:
    from samebits.engine.opening import OpenRun


def warn_before(folder: Path, config: RunConfig) -> None:
    """Run the checks of `samebits doctor` that take milliseconds, and print their warnings and problems."""
    from samebits.doctor.machine import short  # late, since it imports torch

    needs_shared_memory = (
        isinstance(config.loader.num_workers, int) and config.loader.num_workers > 0
    )
    results = short(folder, needs_shared_memory=needs_shared_memory)
    if found := [result for result in results if result.verdict in ("warning", "problem")]:
        console = Console(sys.stderr)
        console.draw(table(found))
        console.say("For all checks: samebits doctor")


def train_command(
    found: RecipeSpec,
    loaded: Loaded[RunConfig],
    run_dir: Path | None,
    resume: str,
    options: LaunchOptions,
    stop_after: int | None = None,
) -> int:
    """Join the world that another launcher started, or start one; return the exit code.

    It is 0, or 128 + a signal's number if the run was stopped after it saved.

    Args:
        found, loaded: The recipe and its resolved settings. No process reads the user's files again.
        options, stop_after: Processes and machines; the step after which training stops and is saved, or None.

    Raises:
        SamebitsError: A failure that the user can act on.
    """
    started_at = time.time()
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
        stop_after=stop_after,
    )
    nodes = rendezvous_config(options, config, run_dir)
    if here is None:  # otherwise every rank would report the same
        check_before_start(config, run_dir, spec.resume)
    default = 1 if here is not None else default_procs(config)
    procs = parse_range(str(default if options.procs is None else options.procs), "--procs")
    if procs.most == 1 and nodes is None:
        from samebits.engine.loop import train

        with _joined(found, spec, here or ALONE) as run:
            return run.end(train(run))

    # Before torch is imported here, so that both imports run at the same time.
    forkserver.prepare(forkserver.PRELOAD, config.num_threads)
    from samebits.storage.run_folder import drop_empty, new_folder

    folder = run_dir or new_folder(found.name)
    text = replace(spec, folder=folder).to_json()
    log = log_path(folder, 0)
    with notice_if_slow(
        f"starting {procs} process{'es' if procs.most > 1 else ''}",
        lambda: log.exists() and log.stat().st_mtime > started_at,
    ):
        code = launch_here(
            procs, config, _train_worker, (text,), folder, options.max_restarts, nodes
        )
    if code and run_dir is None:
        drop_empty(folder)
    return code


def _train_worker(text: str) -> int:
    """Train as one of the launcher's processes. The environment has its rank."""
    from samebits.engine.loop import train

    found = find(recipe_of(text))
    spec = RunSpec.from_json(text, found.config_class)
    with _joined(found, spec, read_assignment(os.environ) or ALONE) as run:
        return run.end(train(run))


@contextmanager
def _joined(found: RecipeSpec, spec: RunSpec, here: RankAssignment) -> Iterator[OpenRun]:
    """Join the world as one of its processes, and open the run."""
    from samebits.cluster import collectives
    from samebits.engine.opening import opened
    from samebits.storage.run_folder import drop_empty, new_folder

    is_new = spec.folder is None
    # Until all ranks have joined there is nothing to save, so a signal may end the process at once.
    with join_world(here, spec.config) as world:
        if world.restart and is_new:
            raise LaunchError(
                f"this is restart {world.restart} of the processes, and no run folder was given",
                fix="Give --run-dir where restarts are allowed. The run so far is the newest folder under runs/; "
                "resume it with --run-dir and --resume auto.",
            )
        folder = spec.folder or collectives.run_on_rank0(world, lambda: new_folder(found.name))
        if here.started_by != "samebits" and world.local_rank == 0:
            warn_before(folder, spec.config)
        try:
            with opened(
                replace(spec, folder=folder, is_restart=world.restart > 0), found, world
            ) as run:
                yield run
        except SamebitsError:
            if is_new:
                drop_empty(folder)
            raise


def check_before_start(config: RunConfig, run_dir: Path | None, resume: str) -> None:
    """Check what can be known before processes start and torch is imported, which takes seconds.

    The ranks check all of it again, and what needs torch.

    Args:
        config, run_dir: The resolved settings and the run folder; None: a new one below runs/.
        resume: "never", "auto", or the folder of a checkpoint.

    Raises:
        LaunchError: The device is cuda, and this machine has none.
        DataError: The data is missing.
        ConfigError: The run to resume has other settings, or a package of the recipe or a tracker is missing.
    """
    from samebits.provenance.identity import check_came_from, check_same_run
    from samebits.storage.run_folder import RunFolder

    require_recipe(config.recipe)
    check_device(config.device)
    if run_dir is not None and resume == "auto":
        check_same_run(RunFolder(run_dir), config, resume)
    elif resume not in ("never", "auto"):
        check_came_from(RunFolder(Path(resume).parent.parent), config)
    config.check_inputs()
