"""`samebits train`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from samebits.cli.options import (
    Debug,
    Init,
    LocalRank,
    Overrides,
    Rank,
    WorldSize,
    argument,
    option,
    path_option,
)
from samebits.errors import ConfigError
from samebits.launch.subcommand import SAMEBITS

if TYPE_CHECKING:
    from samebits.launch.start import LaunchOptions

Source = Annotated[
    str | None,
    argument(
        "SOURCE",
        "A recipe (mnist), a preset (digits), your YAML file or your recipe file (.py). "
        "Default: the recipe of the run folder.",
    ),
]
Procs = Annotated[
    str | None,
    option(
        "N",
        "Processes on this machine; default: one per GPU, or one per core. MIN:MAX: if one is lost for good, "
        "continue with the rest.",
        "--procs",
        "--nproc-per-node",
    ),
]
NumNodes = Annotated[
    str | None,
    option(
        "N",
        "Nodes; run this command on each. MIN:MAX: continue without a lost node, and accept it when it returns.",
        "--nodes",
        "--nnodes",
    ),
]
Endpoint = Annotated[
    str | None,
    option("HOST:PORT", "Address of the rendezvous; HOST is one of the nodes.", "--rdzv-endpoint"),
]
RunId = Annotated[
    str | None,
    option(
        "NAME",
        "Name of the run at the rendezvous; default: the name of the run folder.",
        "--rdzv-id",
    ),
]
Hosts = Annotated[
    str | None,
    option(
        "A,B:4",
        "Start on these hosts by ssh; 4 processes on B. Folder and Python need the same paths on each.",
    ),
]


RunDir = Annotated[
    Path | None, path_option("--run-dir", "DIR", "Run folder; default: a new one below runs/.")
]
Resume = Annotated[
    str,
    option(
        "HOW",
        "never; auto: from the newest complete checkpoint of --run-dir, if any; or the folder of a checkpoint.",
    ),
]
MaxRestarts = Annotated[
    int,
    option("N", "How often to replace a lost process of this machine, or restart all.", min=0),
]
StopAfter = Annotated[
    int | None,
    option(
        "STEPS", "Stop after so many steps in all and save; --resume auto continues the run.", min=1
    ),
]


def train(
    source: Source = None,
    overrides: Overrides = None,
    procs: Procs = None,
    nodes: NumNodes = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunId = None,
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
    from samebits.launch.start import LaunchOptions
    from samebits.launch.subcommand import end_with_caller
    from samebits.process_range import MAX_NODES, MAX_PROCS, parse_range
    from samebits.recipes.catalog import command_arguments, find
    from samebits.recipes.trust import check_tracker_files, trust_named
    from samebits.report.trackers.tracker import check_trackers
    from samebits.storage.run_folder import check_run_dir

    if source is not None and "=" in source and not Path(source).exists():
        # settings for the run in --run-dir
        overrides = [source, *(overrides or [])]
        source = None
    # Checked before torch is imported, so that a wrong option is refused at once.
    for name, text, limit in (("--procs", procs, MAX_PROCS), ("--nodes", nodes, MAX_NODES)):
        if text is not None:
            parse_range(text, name, limit)
    here = read_assignment(os.environ, init, rank, world_size)
    source, overrides = _stored_source(
        source, overrides or [], run_dir, None if here is None else here.restart
    )
    options = LaunchOptions(
        procs, nodes, rdzv_endpoint, rdzv_id, init, rank, world_size, max_restarts
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
            command = [*SAMEBITS, "train", *command_arguments(found, loaded)]
            command += ["--resume", resume, "--max-restarts", str(max_restarts)]
            command += ["--stop-after", str(stop_after)] if stop_after is not None else []
            return _on_hosts(hosts, options, found.name, command, run_dir, resume)
        if run_dir is not None:
            check_run_dir(run_dir, resume, is_first=nodes is None and here is None)
        end_with_caller()
        from samebits.cli.start_run import train_command  # late: --help needs none of it

        return train_command(found, loaded, run_dir, resume, options, stop_after)


def _starts_processes(procs: str | None, nodes: str | None) -> bool:
    """Whether the training probably runs in processes of their own, as far as that is known without the settings."""
    from samebits.cores import num_cores

    return nodes is not None or (num_cores() > 1 if procs is None else procs != "1")


def _on_hosts(
    hosts: str,
    options: LaunchOptions,
    name: str,
    arguments: list[str],
    run_dir: Path | None,
    resume: str,
) -> int:
    """Start this command on hosts by ssh, without the options that only a command of one node has."""
    from samebits.launch.ssh import RemoteHost, parse_hosts, run_on_hosts
    from samebits.launch.start import DEFAULT_PORT
    from samebits.storage.run_folder import check_run_dir, drop_empty, new_folder

    of_one = ("nodes", "procs", "init", "rank")
    if given := [f"--{each}" for each in of_one if getattr(options, each) is not None]:
        raise ConfigError(
            f"--hosts {hosts} starts the nodes itself, and cannot be combined with options of one node",
            fix=f"Remove {', '.join(given)}.",
        )
    if run_dir is not None:
        check_run_dir(run_dir, resume)
    machines = parse_hosts(hosts)
    folder = run_dir or new_folder(name)

    def command(number: int, machine: RemoteHost) -> list[str]:
        parts = [*arguments, "--run-dir", str(folder)]
        parts += ["--procs", str(machine.procs)] if machine.procs is not None else []
        if len(machines) > 1:
            endpoint = options.endpoint or f"{machines[0].host}:{DEFAULT_PORT}"
            parts += ["--nodes", str(len(machines)), "--rdzv-endpoint", endpoint]
        return parts

    try:
        return run_on_hosts(machines, command)
    finally:
        if run_dir is None:
            drop_empty(folder)


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
