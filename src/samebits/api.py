"""Training as a function, and a world for a training loop of your own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.cluster.env import ALONE, read_assignment
from samebits.config.given import as_overrides, given_path
from samebits.errors import ConfigError, LaunchError
from samebits.launch.start import resume_from
from samebits.launch.subcommand import SAMEBITS, run_subcommand
from samebits.process_range import parse_range
from samebits.recipes.catalog import command_arguments, find
from samebits.recipes.trust import check_tracker_files
from samebits.run_views.run import Run

if TYPE_CHECKING:
    from samebits.cluster.world import World


def train(
    source: str | Path,
    settings: Mapping[str, Any] | None = None,
    *,
    procs: int | str | None = None,
    run_dir: str | Path | None = None,
    resume: str = "never",
) -> Run:
    """Train as `samebits train` does. Training runs in processes of its own, so this works in a notebook too.

    Args:
        source: A recipe, a preset, a YAML file or a recipe file. In a notebook, `%%writefile my_recipe.py` makes one.
        settings: Settings by name: `{"epochs": 3, "optim.lr": 0.1}`, or nested.
        procs: Processes on this machine: 4, or "2:4". None: one per GPU, or one per core.
        run_dir: The run folder. None: a new one below runs/.
        resume: "never", "auto", or the folder of a checkpoint.

    Raises:
        SamebitsError: The error of the command, with its kind and slots.
        Stopped: The user pressed Ctrl-C, and the run has saved a checkpoint. A kind of KeyboardInterrupt.
    """
    from samebits.storage.run_folder import drop_empty, new_folder

    # Refused before a folder is made for the run.
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a {type(source).__name__} is not a recipe",
            allowed="the name of a recipe or preset, or the path of a file",
            fix="Write the recipe to a file; in a notebook, begin its cell with %%writefile my_recipe.py.",
        )
    found = find(str(source))
    overrides = as_overrides(settings)
    loaded = found.load(overrides)
    check_tracker_files(loaded.config.report.trackers, overrides)
    if procs is not None:
        parse_range(str(procs), "procs")
    given = None if run_dir is None else given_path(run_dir, "run_dir")
    resume = resume_from(resume, given)
    folder = given or new_folder(found.name)
    command = [*SAMEBITS, "train", *command_arguments(found, loaded)]
    command += ["--run-dir", str(folder), "--resume", resume]
    if procs is not None:
        command += ["--procs", str(procs)]
    try:
        code, error = run_subcommand(command)
    finally:
        if given is None:
            drop_empty(folder)
    if error is not None:
        raise error
    if code:
        raise LaunchError(
            f"training was stopped by signal {code - 128} and has saved a checkpoint",
            fix=f'Resume it: samebits.train({str(source)!r}, run_dir={str(folder)!r}, resume="auto").',
        )
    return Run.load(folder)


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
    """Join the world of this process, for a training loop of your own.

    Args:
        init: URL of the rendezvous, with `rank` and `world_size`, as for `samebits train --init`. None: the world
            that torchrun, srun, mpirun or the environment defines, or this process alone.
        rank: Rank of this process, from 0.
        world_size: Number of processes.
        device: auto, cpu or cuda.
        backend: auto, gloo or nccl.
        join_timeout_s: Longest wait for all processes to join, seconds.
        timeout_s: Longest wait in a collective, seconds.

    Raises:
        LaunchError: The processes cannot join each other, or one is lost.
    """
    from samebits.cluster.world import join

    here = read_assignment(os.environ, init, rank, world_size) or ALONE
    with join(
        here, device=device, backend=backend, join_timeout_s=join_timeout_s, timeout_s=timeout_s
    ) as joined:
        yield joined
