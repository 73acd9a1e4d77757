"""`lockstep train`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.options import Debug, LocalRank, Overrides, path_of
from lockstep.errors import ConfigError
from lockstep.launch.commands import LOCKSTEP

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A recipe (mnist), a preset (digits), your YAML file or your recipe file (.py). "
        "Left out: the run in --run-dir.",
        show_default=False,
    ),
]
Procs = Annotated[
    str | None,
    typer.Option(
        "--procs",
        "--nproc-per-node",
        metavar="N",
        help="Processes on this machine; if left out: one a GPU, or one a core. MIN:MAX: where one is lost for good, "
        "go on with those left.",
        show_default=False,
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        "--nnodes",
        metavar="N",
        help="Machines, with this command on each. MIN:MAX: go on with those left, and take one back when it returns.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str | None,
    typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the machines meet; HOST is one of them."),
]
NodeRank = Annotated[
    int | None,
    typer.Option(metavar="R", help="This machine's rank, from 0; with --master, where the machines are numbered."),
]
Master = Annotated[
    str | None,
    typer.Option("--master", "--master-addr", metavar="HOST:PORT", help="Where node rank 0 is; the same on all."),
]
MasterPort = Annotated[int | None, typer.Option(min=1, max=65535, metavar="PORT", help="If --master has none.")]
RunId = Annotated[
    str | None,
    typer.Option(
        "--rdzv-id",
        metavar="NAME",
        help="The run's name at the rendezvous; the run folder's name if left out.",
        show_default=False,
    ),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        metavar="A,B:4",
        help="On these machines, by ssh from here; B with 4 processes. Folder and Python at the same place on each.",
        show_default=False,
    ),
]


RunDir = Annotated[
    Path | None,
    typer.Option(
        parser=path_of("--run-dir"), metavar="DIR", help="The run's folder; a new one under runs/ if left out."
    ),
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="never; auto: from the newest whole checkpoint of --run-dir, if there is one; or a checkpoint's folder.",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Join others at tcp://HOST:PORT, file:///PATH or env://, with --rank and --world-size."
    ),
]
Rank = Annotated[int | None, typer.Option(metavar="R", help="This process's rank, from 0.")]
WorldSize = Annotated[int | None, typer.Option(metavar="W", help="How many processes there are in all.")]
MaxRestarts = Annotated[
    int, typer.Option(min=0, metavar="N", help="How often to start again after a process of this machine was lost.")
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
    debug: Debug = False,
) -> int:
    """Train, on any number of processes, to the same model each time.

    `lockstep config SOURCE` shows every setting. Under torchrun the command joins the world that it started.
    """
    from lockstep.cluster.env import read_assignment
    from lockstep.config.load import load
    from lockstep.config.process_range import MAX_NODES, MAX_PROCS, parse_range
    from lockstep.recipes.catalog import command_arguments, find
    from lockstep.recipes.trust import trust_named

    if source is not None and "=" in source and not Path(source).exists():
        overrides, source = [source, *(overrides or [])], None  # settings for the run in --run-dir
    # Checked before torch is imported: a mistake in a setting is answered at once.
    for option, text, limit in (("--procs", procs, MAX_PROCS), ("--nodes", nodes, MAX_NODES)):
        if text is not None:
            parse_range(text, option, limit)
    here = read_assignment(os.environ, init, rank, world_size)
    is_restart = here is not None and here.restart > 0
    source, overrides = _stored_source(source, overrides or [], run_dir, is_restart=is_restart)
    found = find(source)
    loaded = load(found.config_class, found.layers, overrides)
    trust_named(source)

    from lockstep.storage.run_folder import check_run_dir

    if hosts is not None:
        _check_alone({"--nodes": nodes, "--procs": procs, "--init": init, "--rank": rank, "--node-rank": node_rank,
                      "--master": master})  # fmt: skip
        if run_dir is not None:
            check_run_dir(run_dir, resume)
        arguments = command_arguments(found, loaded.diff)
        return _on_hosts(hosts, found.name, arguments, rdzv_endpoint, run_dir, resume, max_restarts)

    if run_dir is not None:
        check_run_dir(run_dir, resume, is_first=nodes is None and here is None)
    from lockstep.cli import start_run
    from lockstep.launch.start import LaunchOptions

    # --local-rank is what old launchers add to the command; torchrun gives it as a variable too.
    master = _with_port(master, master_port)
    options = LaunchOptions(
        procs, nodes, rdzv_endpoint, rdzv_id, init, rank, world_size, max_restarts, node_rank, master
    )
    return start_run.train_command(found, loaded, run_dir, resume, options)


def _check_alone(others: Mapping[str, object]) -> None:
    """Check that --hosts is given without the options that it sets for each host."""
    given = [option for option, value in others.items() if value is not None]
    if given:
        raise ConfigError(f"--hosts was given with {', '.join(given)}", fix=f"Remove {', '.join(given)}.")


def _on_hosts(
    hosts: str,
    name: str,
    arguments: list[str],
    endpoint: str | None,
    run_dir: Path | None,
    resume: str,
    max_restarts: int,
) -> int:
    from lockstep.launch.ssh import RemoteHost, parse_hosts, run_on_hosts
    from lockstep.launch.start import DEFAULT_PORT
    from lockstep.storage.run_folder import drop_empty, new_folder

    machines = parse_hosts(hosts)
    folder = run_dir or new_folder(name)

    def command(number: int, machine: RemoteHost) -> list[str]:
        words = [*LOCKSTEP, "train", *arguments]
        words += ["--run-dir", str(folder), "--resume", resume, "--max-restarts", str(max_restarts)]
        words += ["--procs", str(machine.procs)] if machine.procs is not None else []
        if len(machines) > 1:
            words += ["--nodes", str(len(machines))]
            words += ["--rdzv-endpoint", endpoint or f"{machines[0].host}:{DEFAULT_PORT}"]
        return words

    try:
        return run_on_hosts(machines, command, lambda text: print(text, file=sys.stderr))
    finally:
        if run_dir is None:
            drop_empty(folder)


def _with_port(master: str | None, port: int | None) -> str | None:
    """torchrun has two options for the one address."""
    if port is None:
        return master
    if master is None:
        raise ConfigError("--master-port was given without --master", fix="--master HOST:PORT, or --master-addr HOST")
    if master.count(":") == 1 or "]:" in master:
        raise ConfigError(f"--master {master} has a port, and --master-port is {port}", fix="give it once")
    return f"[{master}]:{port}" if ":" in master and "[" not in master else f"{master}:{port}"


def _stored_source(
    source: str | None, overrides: list[str], run_dir: Path | None, *, is_restart: bool
) -> tuple[str, list[str]]:
    """The source and overrides of a run; its stored settings where the user named none, or edited a YAML file since.

    Args:
        source: What the command line names.
        overrides: Its settings.
        run_dir: The run folder.
        is_restart: Whether another launcher has restarted this process: the run then keeps its settings.
    """
    if source is None:
        return _source_of(run_dir), overrides
    is_stored = is_restart and run_dir is not None and (run_dir / "config.yaml").is_file()
    if is_stored and source.endswith((".yaml", ".yml")):
        return _source_of(run_dir), []
    return source, overrides


def _source_of(run_dir: Path | None) -> str:
    """A run folder knows what it trains."""
    if run_dir is None:
        raise ConfigError("nothing says what to train", fix="lockstep train digits, for a first run")
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(
            f"{run_dir} holds no run, so it does not say what to train",
            fix="name a recipe, a preset or a file; a run that was stopped before it began has to be named again",
        )
    return str(run_dir / "config.yaml")
