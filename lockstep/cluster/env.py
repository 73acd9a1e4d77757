"""Who am I, as the environment or the command line says. The only file that reads RANK and its relatives
(`schedulers.py` puts Slurm's and MPI's into these words).

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn
from urllib.parse import urlsplit

from lockstep.cluster.schedulers import Scheduler, to_torchrun_env
from lockstep.errors import LaunchError

StartedBy = Literal["lockstep", "torchrun", "slurm", "mpi", "command line", "alone"]

# Set for the workers by our own launcher.
LAUNCHED = "LOCKSTEP_LAUNCHED"
# A secret that all processes of a run share.
KEY = "LOCKSTEP_KEY"
SHORTEST_KEY = 16
FORMS = "tcp://HOST:PORT, file:///PATH or env://"


@dataclass(frozen=True)
class RankAssignment:
    """One process's place among the processes of a world.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: How many processes there are.
        local_rank: Place among those on this machine; None where nobody said so (joining the world finds it out).
        local_world_size: How many run on this machine; None where nobody said so.
        init: Where the processes meet: tcp://HOST:PORT or file:///PATH; empty for a process that is alone.
        started_by: Who started the processes.
        restart: How often the launcher has started them again.
        agent_store: Somebody else serves the store at `init` (torchrun's agent), so rank 0 must not.
        run_id: Keeps the keys of runs apart that share a store.
        key: Signs what the processes leave for each other in the store; empty: nothing is signed.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    init: str
    started_by: StartedBy
    restart: int = 0
    agent_store: bool = False
    run_id: str = ""
    key: str = field(default="", repr=False)


ALONE = RankAssignment(0, 1, 0, 1, "", "alone")


def is_in_world(environ: Mapping[str, str]) -> bool:
    """Whether somebody has started this process as one of a world."""
    environ, _ = to_torchrun_env(environ)
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))


def read_assignment(
    environ: Mapping[str, str], init: str | None = None, rank: int | None = None, world_size: int | None = None
) -> RankAssignment | None:
    """This process's place, or None where nobody has started a world.

    Args:
        environ: Environment variables.
        init: What `--init` says; `env://` takes the address from MASTER_ADDR and MASTER_PORT.
        rank: What `--rank` says.
        world_size: What `--world-size` says.

    Raises:
        LaunchError: A part is missing, is not a number, or contradicts another.
    """
    run_key(environ)  # checked even where this process is none of a world: it will start some
    if init is None and rank is None and world_size is None:
        return _from_environment(environ) if is_in_world(environ) else None
    if init is None:
        given = "--rank" if rank is not None else "--world-size"
        raise LaunchError(f"{given} was given without --init", fix=f"say where the processes meet: --init {FORMS}")
    if init.rstrip("/") == "env:":
        return _from_environment(environ, rank, world_size)
    if rank is None or world_size is None:
        missing = "--rank" if rank is None else "--world-size"
        raise LaunchError(
            f"--init {init} was given without {missing}", fix=f"add {missing} to the command, on each machine its own"
        )
    return RankAssignment(
        rank=_checked_rank(rank, world_size, "--rank", "--world-size"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", None),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", None),
        init=check_init(init),
        started_by="command line",
        key=run_key(environ),
    )


def run_key(environ: Mapping[str, str]) -> str:
    """The secret in LOCKSTEP_KEY; empty where it is not set.

    Raises:
        LaunchError: It is too short to be a secret.
    """
    key = environ.get(KEY, "").strip()
    if key and len(key) < SHORTEST_KEY:
        raise LaunchError(
            f"the environment's {KEY} has {len(key)} characters",
            allowed=f"{SHORTEST_KEY} or more",
            fix=f"on all machines the same: export {KEY}=... with the output of: openssl rand -hex 32",
        )
    return key


def _from_environment(
    environ: Mapping[str, str], rank: int | None = None, world_size: int | None = None
) -> RankAssignment:
    environ, scheduler = to_torchrun_env(environ)
    rank = _number(environ, "RANK", rank)
    world_size = _number(environ, "WORLD_SIZE", world_size)
    if rank is None:
        _missing("RANK", environ)
    if world_size is None:
        _missing("WORLD_SIZE", environ)
    _checked_rank(rank, world_size, "RANK", "WORLD_SIZE")
    host = environ.get("MASTER_ADDR")
    port = _number(environ, "MASTER_PORT", None)
    if not host:
        _missing("MASTER_ADDR", environ)
    if port is None:
        _missing("MASTER_PORT", environ)
    local_rank = _number(environ, "LOCAL_RANK", None)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", None)
    if local_rank is not None and local_world_size is not None:
        _checked_rank(local_rank, local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return RankAssignment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        init=check_init(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", "MASTER_ADDR/MASTER_PORT"),
        started_by=_started_by(environ, scheduler),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", None) or 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        key=run_key(environ),
    )


def _started_by(environ: Mapping[str, str], scheduler: Scheduler) -> StartedBy:
    if environ.get(LAUNCHED):
        return "lockstep"
    if scheduler:
        return scheduler
    return "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "command line"


def check_init(init: str, where: str = "--init") -> str:
    """Give `init` back if it is an address that processes can meet at.

    Raises:
        LaunchError: It is not.
    """
    try:
        parts = urlsplit(init)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise LaunchError(f"{where} is {init}: {error}", allowed=FORMS) from None
    if parts.scheme == "tcp":
        if not host or not port:
            raise LaunchError(f"{where} is {init}: it has no {'host' if not host else 'port'}", allowed=FORMS)
        return init
    if parts.scheme == "file":
        # file://name/x would silently lose the first folder: urlsplit takes it for a host.
        if parts.netloc or not parts.path.strip("/"):
            raise LaunchError(
                f"{where} is {init}: the path must be absolute, with three slashes", allowed="file:///PATH"
            )
        return init
    raise LaunchError(f"{where} is {init}: not an address that processes can meet at", allowed=FORMS)


def _number(environ: Mapping[str, str], name: str, given: int | None) -> int | None:
    text = environ.get(name)
    if given is not None or not text:
        return given
    try:
        value = int(text)
    except ValueError:
        raise LaunchError(f"the environment's {name} is {text!r}, not a whole number") from None
    if value < 0:
        raise LaunchError(f"the environment's {name} is {value}, below 0")
    return value


def _checked_rank(rank: int, world_size: int, rank_name: str, size_name: str) -> int:
    if world_size < 1:
        raise LaunchError(f"{size_name} is {world_size}", allowed="1 or more")
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"{rank_name} is {rank}, but {size_name} is {world_size}",
            allowed=f"ranks 0 to {world_size - 1}; each process its own",
        )
    return rank


def _missing(name: str, environ: Mapping[str, str]) -> NoReturn:
    there = [
        f"{key}={environ[key]}" for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if environ.get(key)
    ]
    raise LaunchError(
        f"{name} is not set in the environment",
        given=" ".join(there),
        fix="set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none of them",
    )
