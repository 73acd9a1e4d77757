"""From command-line options to processes: how many to start, which rank this process is, and starting them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samebits.cluster.env import RankAssignment, read_assignment
from samebits.config.given import flat, given_path
from samebits.config.schema import ClusterConfig, Mark, RunConfig, marks_of
from samebits.cores import num_cores, visible_gpus
from samebits.errors import ConfigError, LaunchError
from samebits.launch import forkserver
from samebits.launch.crew.recovery import choose_recovery
from samebits.process_range import MAX_NODES, ProcessRange, RendezvousConfig, parse_range
from samebits.report.log import log_path
from samebits.version import __version__

if TYPE_CHECKING:
    from samebits.cluster.world import World


# What is known about GPUs before torch is imported, which takes seconds.


# Device files of CUDA (also on Jetson and WSL) and of ROCm, whose devices torch calls cuda too.
_DEVICE_FILES = ("nvidia*", "nvmap", "nvhost*", "dxg", "kfd")


def check_device(device: str, folder: Path = Path("/dev")) -> None:
    """Check that a device which a user has set can exist on this machine.

    Only what is certain is refused. Whether torch can use a GPU that is there is checked when a process has imported
    torch.
    """
    if device != "cuda":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # From the package's metadata: importing torch takes seconds, and this is checked before any process starts.
    torch = version("torch")
    if torch.endswith("+cpu"):
        cause = "this build of torch has no CUDA"
        fix = "Set device=cpu, or install a build of torch with CUDA."
    elif visible is not None and visible.strip() in ("", "-1"):
        cause = "CUDA_VISIBLE_DEVICES hides all GPUs"
        fix = "Set device=cpu, or unset CUDA_VISIBLE_DEVICES."
    elif sys.platform == "linux" and not any(
        path for name in _DEVICE_FILES for path in folder.glob(name)
    ):
        cause = "this machine has no GPU, or its driver is not loaded"
        fix = "Set device=cpu, or check nvidia-smi."
    else:
        return
    raise LaunchError(
        "device is cuda, but there is no CUDA device",
        given=f"torch {torch}, CUDA_VISIBLE_DEVICES={'not set' if visible is None else visible}",
        where=socket.gethostname(),
        cause=cause,
        fix=fix,
    )


# Versions and settings that all launchers of a run must share. Nothing here imports torch.


def shared_settings(settings: Mapping[str, Any], recipe: str) -> dict[str, str]:
    """Collect versions, recipe and settings, by name."""
    found = {"samebits": __version__, "torch": version("torch")}
    if recipe.endswith(".py"):
        with suppress(OSError):  # loading the recipe reports a file that cannot be read
            # The content and not the path: checkouts of two machines may lie in different folders.
            found["recipe file, SHA-256"] = hashlib.sha256(
                Path(recipe).expanduser().read_bytes()
            ).hexdigest()[:16]
    values = flat(settings)
    return found | {
        f"setting {name}": json.dumps(values[name])
        for name in values
        if Mark.MACHINE not in marks_of(name)
    }


DEFAULT_PORT = 29400  # torchrun's


@dataclass(frozen=True)
class LaunchOptions:
    """Options of the command line about processes and machines."""

    procs: str | int | None = None  #: Processes on this machine: 4, or 2:4.
    nodes: str | None = None  #: Machines: 2, or 2:3.
    endpoint: str | None = None  #: HOST:PORT of the rendezvous of several machines' launchers.
    run_id: str | None = (
        None  #: Separates runs that share a rendezvous; None: the run folder's name.
    )
    init: str | None = None  #: Address of the rendezvous of processes that the user starts.
    rank: int | None = None  #: Rank of this process.
    world_size: int | None = None  #: Number of processes.
    max_restarts: int = 0  #: How often to restart after a failure.


def default_procs(config: RunConfig) -> int:
    """Return how many processes `samebits train` starts by default: one per GPU; on CPU one per core that has work.

    The number does not change the result.
    """
    num_micro_batches = -(-config.global_batch // config.micro_batch)
    if config.device != "cpu" and (num_gpus := len(visible_gpus())):
        return max(1, min(num_gpus, num_micro_batches))
    return max(1, min(num_cores() // config.num_threads, num_micro_batches, 8))


def rank_assignment(
    procs: object, init: str | None = None, rank: int | None = None, world_size: int | None = None
) -> RankAssignment | None:
    """Return this process's rank in a world that the user or a scheduler started; None if there is no such world.

    Raises:
        ConfigError: `--procs` was given to one rank of such a world.
        LaunchError: The rank's variables or options are incomplete, or contradict each other.
    """
    here = read_assignment(os.environ, init, rank, world_size)
    if here is not None and procs is not None:
        raise ConfigError(
            f"--procs {procs} was given to one process of a world of {here.world_size}",
            fix="Remove --procs: the number of started processes sets the world size.",
        )
    return here


def rendezvous_config(
    options: LaunchOptions, config: RunConfig, run_dir: Path | None
) -> RendezvousConfig | None:
    """Return the rendezvous of several machines' launchers; None if this machine is the only one.

    Raises:
        ConfigError: The options are incomplete or contradict each other.
    """
    size = (
        parse_range(options.nodes, "--nodes", MAX_NODES)
        if options.nodes is not None
        else ProcessRange(1, 1)
    )
    if size.most == 1:
        if options.endpoint is not None:
            raise ConfigError(
                "--rdzv-endpoint was given for one machine",
                fix="Add the number of machines: --nodes 2",
            )
        return None
    if options.endpoint is None:
        raise ConfigError(
            f"--nodes {size} was given without --rdzv-endpoint",
            fix="On all machines, add the same --rdzv-endpoint HOST:PORT, where HOST is one of them.",
        )
    if run_dir is None:
        raise ConfigError(
            f"--nodes {size} was given without --run-dir",
            fix="Add the same --run-dir on all machines: --run-dir runs/NAME-0001",
        )
    return rendezvous_of(
        config.cluster,
        size=size,
        endpoint=with_port(options.endpoint),
        run_id=options.run_id or run_dir.absolute().name or "samebits",
        folder=run_dir,
        has_own_id=bool(options.run_id),
        shared=shared_settings(config.model_dump(mode="json"), config.recipe),
    )


def rendezvous_of(cluster: ClusterConfig, **options: Any) -> RendezvousConfig:
    """Return a rendezvous with the timeouts of the settings; `options`: its other fields."""
    return RendezvousConfig(
        join_timeout_s=cluster.join_timeout_s,
        last_call_s=cluster.last_call_s,
        node_timeout_s=cluster.node_timeout_s,
        **options,
    )


def with_port(endpoint: str) -> str:
    """Return HOST:PORT for HOST or HOST:PORT."""
    match = re.fullmatch(r"(\[[^][/\s]+\]|[^][:/\s]+)(?::([0-9]{1,5}))?", endpoint)
    port = int(match[2] or DEFAULT_PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(
            f"--rdzv-endpoint is {endpoint!r}",
            allowed=f"HOST:PORT with a port from 1 to 65535, or HOST for port {DEFAULT_PORT};\n"
            "an IPv6 address in brackets: [::1]:PORT",
            fix=f"Set it to one of the machines, such as --rdzv-endpoint node1:{DEFAULT_PORT}.",
        )
    return f"{match[1]}:{port}"


def resume_from(resume: str, run_dir: Path | None) -> str:
    """Return the value of `--resume` with ~ expanded, checked before a run folder is created.

    Raises:
        ConfigError: There is nothing to resume from.
    """
    if resume == "never":
        return resume
    if resume == "auto":
        if run_dir is None:
            raise ConfigError(
                "--resume auto was given without --run-dir",
                fix="Add the run to resume: --run-dir runs/NAME-0001",
            )
        return resume
    path = given_path(resume, "--resume")
    if (path / "config.yaml").is_file():
        raise ConfigError(
            f"--resume {resume} is a run folder",
            fix=f"Resume it with --run-dir {shlex.quote(resume)} --resume auto",
        )
    if not (path / "manifest.json").is_file():
        raise ConfigError(
            f"--resume {resume} is not a checkpoint",
            allowed="never, auto, or a checkpoint's folder: RUN/checkpoints/step-…",
            fix="Use --run-dir RUN --resume auto to resume from the newest checkpoint.",
        )
    return str(path)


@contextmanager
def join_world(here: RankAssignment, config: RunConfig) -> Iterator[World]:
    """Join the world with the timeouts and the backend of the settings; see `cluster.world.join` and `join_views`."""
    # Late: it imports torch, and most uses of this module come before that.
    from samebits.cluster.views.regroup import join_views
    from samebits.cluster.world import join
    from samebits.portable.arithmetic import use_portable_arithmetic

    cluster = config.cluster
    join_s, timeout_s = cluster.join_timeout_s, cluster.timeout_s
    # Members may change where processes recover in the step.
    with (
        join_views(here, join_s, timeout_s)
        if here.views
        else join(
            here,
            device=config.device,
            backend=cluster.backend,
            join_timeout_s=join_s,
            timeout_s=timeout_s,
        )
    ) as joined:
        try:
            yield joined
        finally:
            use_portable_arithmetic(False)  # a notebook computes on in this process


def launch_here(
    procs: ProcessRange,
    config: RunConfig,
    entry: Callable[..., Any],
    arguments: tuple[Any, ...],
    folder: Path | None = None,
    max_restarts: int = 0,
    nodes: RendezvousConfig | None = None,
) -> int:
    """Run an entry in processes of this machine with the settings' timeouts; return the exit code. See `launch.launch`.

    Args:
        procs: How many processes; fewer may remain after losses.
        arguments: Its arguments; must be picklable.
        folder: The run folder, for the launcher's log; a stop then saves. None: there is no run.
        max_restarts: How often all processes are restarted after a failure.
        nodes: The other machines; None: this machine only.
    """
    # Late, because of torch: the fork server imports it first.
    from samebits.launch.launch import launch

    return launch(
        procs.most,
        entry,
        arguments,
        min_procs=procs.least,
        max_restarts=max_restarts,
        nodes=nodes,
        stop_timeout_s=config.cluster.stop_timeout_s,
        log_dir=folder / "logs" if folder is not None else None,
        preload=forkserver.PRELOAD,
        on_stop=_on_stop(folder),
        recovery=None
        if folder is None
        else choose_recovery(config, nodes, procs.most, max_restarts),
    )


def _on_stop(folder: Path | None) -> Callable[[], str]:
    """Return a function that describes what a stop signal does at the moment it arrives."""
    if folder is None:
        return lambda: "stopping"
    before = _changed(log_path(folder, 0))

    def describe() -> str:
        # Rank 0 opens its log once it handles stop signals.
        if _changed(log_path(folder, 0)) != before:
            return "finishing the step and saving"
        return "stopping; training has not started, so there is nothing to save"

    return describe


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
