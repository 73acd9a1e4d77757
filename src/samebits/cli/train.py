"""`samebits train`: resolve the settings, and start the run here or in the world of another launcher."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samebits.cli.options import Debug, Init, LocalRank, Overrides, Rank, WorldSize, path_option
from samebits.cluster.env import ALONE, RankAssignment, read_assignment
from samebits.config.load import Loaded
from samebits.config.schema import RunConfig
from samebits.doctor.check_result import table
from samebits.engine.run_spec import RunSpec, recipe_of
from samebits.errors import ConfigError, LaunchError, SamebitsError
from samebits.extras import require_recipe
from samebits.launch import forkserver
from samebits.launch.kernels import pin_kernels
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
from samebits.launch.subcommand import SAMEBITS
from samebits.process_range import parse_range
from samebits.recipes.catalog import RecipeSpec, find
from samebits.report.console import Console
from samebits.report.log import log_path, notice_if_slow

if TYPE_CHECKING:
    from samebits.engine.opening import OpenRun


# Run the quick checks of `samebits doctor` before a run.


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


# Start a run whose settings are resolved: join the world of another launcher, or launch one.
#
# ```
# train_command    check what can be known without torch
#   |-- another launcher has started this process, or one process suffices -> train here
#   `-- otherwise: fork server -> workers, each of which trains as one rank
# ```


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
    pin_kernels(config.kernels)
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
        folder = spec.folder or collectives.broadcast_object(
            world, new_folder(found.name) if world.is_main else None
        )
        assert folder is not None
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
    from samebits.provenance.same_run import check_came_from, check_same_run
    from samebits.storage.run_folder import RunFolder

    require_recipe(config.recipe)
    check_device(config.device)
    if run_dir is not None and resume == "auto":
        check_same_run(RunFolder(run_dir), config, resume)
    elif resume not in ("never", "auto"):
        check_came_from(RunFolder(Path(resume).parent.parent), config)
    config.check_inputs()


# `samebits train`.


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A recipe (mnist), a preset (digits), your YAML file or your recipe file (.py). "
        "Default: the recipe of the run folder.",
    ),
]
Procs = Annotated[
    str | None,
    typer.Option(
        "--procs",
        "--nproc-per-node",
        metavar="N",
        help="Processes on this machine; default: one per GPU, or one per core. MIN:MAX: if one is lost for good, "
        "continue with the rest.",
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "--nnodes",
        metavar="N",
        help="Nodes; run this command on each. MIN:MAX: continue without a lost node, and accept it when it returns.",
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Address of the rendezvous; HOST is one of the nodes.",
    ),
]
NodeRank = Annotated[
    int | None, typer.Option(metavar="R", help="Rank of this node, from 0; with --master.")
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        "--master-addr",
        metavar="HOST:PORT",
        help="Address of node rank 0; the same on all nodes.",
    ),
]
MasterPort = Annotated[
    int | None, typer.Option(min=1, max=65535, metavar="PORT", help="Port of --master.")
]
RunId = Annotated[
    str | None,
    typer.Option(
        "--rdzv-id",
        metavar="NAME",
        help="Name of the run at the rendezvous; default: the name of the run folder.",
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="A,B:4",
        help="Start on these hosts by ssh; 4 processes on B. Folder and Python need the same paths on each.",
    ),
]


RunDir = Annotated[
    Path | None, path_option("--run-dir", "DIR", "Run folder; default: a new one below runs/.")
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="never; auto: from the newest complete checkpoint of --run-dir, if any; or the folder of a checkpoint.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="How often to replace a lost process of this machine, or restart all.",
    ),
]
StopAfter = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEPS",
        help="Stop after so many steps in all and save; --resume auto continues the run.",
    ),
]


def train(
    source: Source = None,
    overrides: Overrides = None,
    procs: Procs = None,
    nodes: NumNodes = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunId = None,
    node_rank: NodeRank = None,
    master: Master = None,
    master_port: MasterPort = None,
    hosts: Hosts = None,
    run_dir: RunDir = None,
    resume: Resume = "never",
    init: Init = None,
    rank: Rank = None,
    world_size: WorldSize = None,
    local_rank: LocalRank = None,
    max_restarts: MaxRestarts = 0,
    stop_after: StopAfter = None,
    debug: Debug = False,
) -> int:
    """Train on any number of processes, to the same model each time.

    `samebits config SOURCE` shows every setting. Under torchrun, srun or mpirun the command joins their world.
    """
    from samebits.cluster.env import read_assignment
    from samebits.launch import forkserver
    from samebits.recipes.catalog import command_arguments, find
    from samebits.recipes.trust import check_tracker_files, trust_named
    from samebits.report.trackers.known import check_trackers
    from samebits.storage.run_folder import check_run_dir

    if source is not None and "=" in source and not Path(source).exists():
        # settings for the run in --run-dir
        overrides = [source, *(overrides or [])]
        source = None
    # Checked before torch is imported, so that a wrong option is refused at once.
    _check_ranges(procs, nodes)
    here = read_assignment(os.environ, init, rank, world_size)
    source, overrides = _stored_source(
        source, overrides or [], run_dir, None if here is None else here.restart
    )
    # The launcher imports torch too for a recipe file, so both imports run at the same time.
    is_early = (
        source.endswith(".py")
        and here is None
        and hosts is None
        and _starts_processes(procs, nodes)
    )
    with forkserver.early() if is_early else nullcontext():
        found = find(source)
        loaded = found.load(overrides)
        trust_named(source)
        check_tracker_files(loaded.config.report.trackers, overrides)
        if here is None:  # of ranks, rank 0 checks
            check_trackers(loaded.config.report.trackers)
        if hosts is not None:
            given = {"--nodes": nodes, "--procs": procs, "--init": init, "--rank": rank, "--node-rank": node_rank,
                     "--master": master}  # fmt: skip
            arguments = command_arguments(found, loaded.diff)
            return _on_hosts(
                hosts,
                given,
                found.name,
                arguments,
                rdzv_endpoint,
                run_dir,
                resume,
                max_restarts,
                stop_after,
            )
        if run_dir is not None:
            check_run_dir(run_dir, resume, is_first=nodes is None and here is None)
        from samebits.launch.start import LaunchOptions
        from samebits.launch.subcommand import end_with_caller

        end_with_caller()
        options = LaunchOptions(procs, nodes, rdzv_endpoint, rdzv_id, init, rank, world_size, max_restarts, node_rank,
                                _with_port(master, master_port))  # fmt: skip
        return train_command(found, loaded, run_dir, resume, options, stop_after)


def _starts_processes(procs: str | None, nodes: str | None) -> bool:
    """Whether the training probably runs in processes of their own, as far as that is known without the settings."""
    from samebits.cores import num_cores

    return nodes is not None or (num_cores() > 1 if procs is None else procs != "1")


def _check_ranges(procs: str | None, nodes: str | None) -> None:
    from samebits.process_range import MAX_NODES, MAX_PROCS, parse_range

    for option, text, limit in (("--procs", procs, MAX_PROCS), ("--nodes", nodes, MAX_NODES)):
        if text is not None:
            parse_range(text, option, limit)


def _on_hosts(
    hosts: str,
    given: Mapping[str, object],
    name: str,
    arguments: list[str],
    endpoint: str | None,
    run_dir: Path | None,
    resume: str,
    max_restarts: int,
    stop_after: int | None,
) -> int:
    """Start this command on hosts by ssh, without the options that only a command of one node has."""
    from samebits.launch.ssh import RemoteHost, parse_hosts, run_on_hosts
    from samebits.launch.start import DEFAULT_PORT
    from samebits.storage.run_folder import check_run_dir, drop_empty, new_folder

    if names := [name for name, value in given.items() if value is not None]:
        raise ConfigError(
            f"--hosts {hosts} starts the nodes itself, and cannot be combined with options of one node",
            fix=f"Remove {', '.join(names)}.",
        )
    if run_dir is not None:
        check_run_dir(run_dir, resume)
    machines = parse_hosts(hosts)
    folder = run_dir or new_folder(name)

    def command(number: int, machine: RemoteHost) -> list[str]:
        parts = [*SAMEBITS, "train", *arguments]
        parts += ["--run-dir", str(folder), "--resume", resume, "--max-restarts", str(max_restarts)]
        parts += ["--procs", str(machine.procs)] if machine.procs is not None else []
        parts += ["--stop-after", str(stop_after)] if stop_after is not None else []
        if len(machines) > 1:
            parts += ["--nodes", str(len(machines))]
            parts += ["--rdzv-endpoint", endpoint or f"{machines[0].host}:{DEFAULT_PORT}"]
        return parts

    try:
        return run_on_hosts(machines, command, lambda text: print(text, file=sys.stderr))
    finally:
        if run_dir is None:
            drop_empty(folder)


def _with_port(master: str | None, port: int | None) -> str | None:
    """Join torchrun's two options for one address."""
    if port is None:
        return master
    if master is None:
        raise ConfigError(
            f"--master-port {port} was given without --master",
            fix="Add --master HOST, or give both as --master HOST:PORT.",
        )
    if master.count(":") == 1 or "]:" in master:
        raise ConfigError(
            f"--master {master} has a port, and --master-port is {port}",
            fix="Remove --master-port.",
        )
    return f"[{master}]:{port}" if ":" in master and "[" not in master else f"{master}:{port}"


def _stored_source(
    source: str | None, overrides: list[str], run_dir: Path | None, restart: int | None
) -> tuple[str, list[str]]:
    """Return source and overrides; those stored with the run if the user named none, or may have edited the YAML file.

    Args:
        restart: How often another launcher has restarted this process; the run then keeps its settings. None: no rank.
    """
    if source is None:
        return _source_of(run_dir), overrides
    is_stored = bool(restart) and run_dir is not None and (run_dir / "config.yaml").is_file()
    if is_stored and source.endswith((".yaml", ".yml")):
        return _source_of(run_dir), []
    return source, overrides


def _source_of(run_dir: Path | None) -> str:
    """Return the source that a run folder stores."""
    from samebits.storage.run_folder import check_utf8

    if run_dir is None:
        raise ConfigError(
            "no recipe was named",
            fix="Name one. For a first run: samebits train digits\n"
            "To resume a run, add its folder: samebits train --run-dir runs/NAME-0001 --resume auto",
        )
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir} contains no run, and no recipe was named",
            fix="Check the path. To start a run there, name a recipe, a preset or a file: samebits train digits\n"
            "A run that was stopped before its first step starts again from the beginning.",
        )
    check_utf8(run_dir)
    return str(run_dir / "config.yaml")
