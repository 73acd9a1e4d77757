"""From what a person asks for to processes: how many there are, which of them this one is, and starting them."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cluster.env import RankAssignment, read_assignment
from lockstep.config.given import given_path
from lockstep.config.process_range import MAX_NODES, ProcessRange, RendezvousConfig, parse_range
from lockstep.config.schema import RunConfig
from lockstep.cores import num_cores
from lockstep.errors import ConfigError
from lockstep.launch.shared_settings import shared_settings
from lockstep.report.log import log_path

if TYPE_CHECKING:
    from lockstep.cluster.world import World

DEFAULT_PORT = 29400  # torchrun's


@dataclass(frozen=True)
class LaunchOptions:
    """What a person said of processes and machines, if anything.

    Attributes:
        procs: Processes on this machine: 4, or 2:4.
        nodes: Machines: 2, or 2:3.
        endpoint: HOST:PORT where the launchers of several machines meet.
        run_id: Keeps runs apart that meet at one place; None: the run folder's name.
        init: Where processes meet that somebody else starts.
        rank: Of this process.
        world_size: How many processes there are.
        max_restarts: How often to start again.
        node_rank: Of this machine, where people number them; with `master`.
        master: HOST:PORT of node rank 0's machine.
    """

    procs: str | int | None = None
    nodes: str | None = None
    endpoint: str | None = None
    run_id: str | None = None
    init: str | None = None
    rank: int | None = None
    world_size: int | None = None
    max_restarts: int = 0
    node_rank: int | None = None
    master: str | None = None


# What a worker needs, imported once in the process that workers are forked from.
PRELOAD = [
    "torch._dynamo",  # the first optimizer of a process imports it, which takes seconds
    "lockstep.cli.main",
    "lockstep.launch.worker",
    "lockstep.engine.evaluate",
    "lockstep.engine.run",
    "lockstep.recipes.catalog",
]


def default_procs(config: RunConfig) -> int:
    """How many processes `lockstep train` starts where nobody says: one a GPU; on CPU, as many as have cores and work.

    Whatever it is, the result is the same.
    """
    if config.parallel == "dp":
        return 1
    num_micro_batches = -(-config.global_batch // config.micro_batch)
    if config.device != "cpu":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # Looked up without torch, whose import takes longer than all else here.
        num_gpus = len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len([v for v in visible.split(",") if v])
        if num_gpus:
            return max(1, min(num_gpus, num_micro_batches))
    return max(1, min(num_cores() // config.num_threads, num_micro_batches, 8))


def rank_assignment(
    procs: object, init: str | None = None, rank: int | None = None, world_size: int | None = None
) -> RankAssignment | None:
    """Which process of a world that somebody else started this one is; None where nobody did.

    Raises:
        ConfigError: It is one, and was told how many processes to start.
        LaunchError: What it was told is not whole, or contradicts itself.
    """
    here = read_assignment(os.environ, init, rank, world_size)
    if here is not None and procs is not None:
        raise ConfigError(
            f"--procs {procs} was given to one process of a world of {here.world_size}",
            fix="leave --procs out: the world has as many processes as were started",
        )
    return here


def rendezvous_config(ask: LaunchOptions, config: RunConfig, run_dir: Path | None) -> RendezvousConfig | None:
    """The machines of a world that a launcher on each of them starts; None where this machine is the only one.

    Raises:
        ConfigError: What was given is not whole.
    """
    size = parse_range(ask.nodes, "--nodes", MAX_NODES) if ask.nodes is not None else ProcessRange(1, 1)
    option = "--rdzv-endpoint" if ask.master is None else "--master"
    endpoint = ask.endpoint if ask.master is None else ask.master
    if size.most == 1:
        if endpoint is not None or ask.node_rank is not None:
            given = option if endpoint is not None else "--node-rank"
            raise ConfigError(f"{given} was given for one machine", fix="say how many there are: --nodes 2")
        return None
    _check_node_rank(ask, size)
    if endpoint is None:
        raise ConfigError(
            f"--nodes {size} was given without --rdzv-endpoint or --master",
            fix="on each of the machines the same: --rdzv-endpoint HOST:PORT, where HOST is one of them; "
            "or --master HOST:PORT and its own --node-rank",
        )
    if run_dir is None:
        raise ConfigError(
            f"--nodes {size} was given without --run-dir",
            fix="on each of the machines the same: --run-dir runs/NAME-0001",
        )
    cluster = config.cluster
    return RendezvousConfig(
        size=size,
        endpoint=_whole(endpoint, option),
        run_id=ask.run_id or run_dir.absolute().name or "lockstep",
        join_timeout_s=cluster.join_timeout_s,
        last_call_s=cluster.last_call_s,
        node_timeout_s=cluster.node_timeout_s,
        rank=ask.node_rank,
        folder=run_dir,
        has_own_id=bool(ask.run_id),
        shared=shared_settings(config.model_dump(mode="json"), config.recipe),
    )


def _whole(endpoint: str, option: str) -> str:
    """HOST:PORT of what may be HOST alone."""
    match = re.fullmatch(r"(\[[^][/\s]+\]|[^][:/\s]+)(?::([0-9]{1,5}))?", endpoint)
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(
            f"{option} is {endpoint!r}",
            allowed=f"HOST:PORT with a port from 1 to 65535, or HOST for port {DEFAULT_PORT};\n"
            "an IPv6 address in brackets: [::1]:PORT",
        )
    return f"{match[1]}:{port}"


def _check_node_rank(ask: LaunchOptions, size: ProcessRange) -> None:
    if ask.master is not None and ask.endpoint is not None:
        raise ConfigError(
            "--master and --rdzv-endpoint were both given",
            fix="--master goes with --node-rank; --rdzv-endpoint alone lets the machines number themselves",
        )
    if (ask.master is None) != (ask.node_rank is None):
        given, missing = ("--master", "--node-rank") if ask.node_rank is None else ("--node-rank", "--master")
        raise ConfigError(
            f"{given} was given without {missing}",
            fix="on all machines the same --master HOST:PORT, on each its own --node-rank; HOST has node rank 0",
        )
    if ask.node_rank is None:
        return
    if size.is_elastic:
        raise ConfigError(
            f"--nodes {size} was given with --node-rank",
            fix="give one number; or --rdzv-endpoint, where the machines may change and number themselves",
        )
    if not 0 <= ask.node_rank < size.most:
        raise ConfigError(
            f"--node-rank is {ask.node_rank}, but --nodes is {size}",
            allowed=f"0 to {size.most - 1}; each machine its own",
        )


def resume_from(resume: str, run_dir: Path | None) -> str:
    """What `--resume` names, ~ written out; asked before a folder is made.

    Raises:
        ConfigError: It is nothing to go on from.
    """
    if resume == "never":
        return resume
    if resume == "auto":
        if run_dir is None:
            raise ConfigError(
                "--resume auto was given without --run-dir", fix="say which run: --run-dir runs/NAME-0001"
            )
        return resume
    path = given_path(resume, "--resume")
    if (path / "config.yaml").is_file():
        raise ConfigError(f"--resume {resume} is a run folder", fix=f"--run-dir {shlex.quote(resume)} --resume auto")
    if not (path / "manifest.json").is_file():
        raise ConfigError(
            f"--resume {resume} is no checkpoint",
            allowed="never, auto, or a checkpoint's folder: RUN/checkpoints/step-…",
        )
    return str(path)


@contextmanager
def join_world(here: RankAssignment, config: RunConfig) -> Iterator[World]:
    """`cluster.world.join` as the settings say."""
    from lockstep.cluster.world import join

    cluster = config.cluster
    with join(
        here,
        device=config.device,
        backend=cluster.backend,
        join_timeout_s=cluster.join_timeout_s,
        timeout_s=cluster.timeout_s,
    ) as joined:
        yield joined


def launch_here(
    procs: ProcessRange,
    config: RunConfig,
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path | None = None,
    max_restarts: int = 0,
    nodes: RendezvousConfig | None = None,
) -> int:
    """`cluster.launch.launch` as the settings say. With a run folder its words are kept there, and a stop saves."""
    from lockstep.launch.launch import launch

    return launch(
        procs.most,
        entry,
        arguments,
        min_procs=procs.least,
        max_restarts=max_restarts,
        nodes=nodes,
        stop_timeout_s=config.cluster.stop_timeout_s,
        log_dir=folder / "logs" if folder is not None else None,
        preload=PRELOAD,
        on_stop=_on_stop(folder),
    )


def _on_stop(folder: Path | None) -> Callable[[], str]:
    """What a stop does, at the moment at which it is asked for."""
    if folder is None:
        return lambda: "stopping"
    before = _changed(log_path(folder, 0))

    def told() -> str:
        # Rank 0 opens its log when it can answer to a stop.
        if _changed(log_path(folder, 0)) != before:
            return "finishing the step and saving"
        return "stopping; training has not started, so there is nothing to save"

    return told


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
