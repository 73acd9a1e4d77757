"""Read this process's rank from the environment or the command line. Nothing here imports torch.

Only this module and `schedulers.py`, which translates the variables of Slurm and MPI, read RANK and its relatives.
"""

import os
import re
import shlex
import socket
import sys
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn
from urllib.parse import urlsplit

import psutil

from samebits.errors import LaunchError

# Translate the variables of Slurm and MPI into torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR ...
#
# Only this module and `env.py` read these variables. Nothing here imports torch.


LOOPBACK = "127.0.0.1"
# Below the range for outgoing connections (32768 and up), above the ports that need root.
PORTS = range(10_000, 30_000)


Scheduler = Literal["slurm", "mpi", ""]


def to_torchrun_env(environ: Mapping[str, str]) -> tuple[Mapping[str, str], Scheduler]:
    """Add torchrun's variables to an environment in which srun or mpirun has started several processes.

    Variables that are already set win: torchrun inside srun, or the user's own MASTER_ADDR. A job step with one task is
    not a world, so `srun --pty bash` behaves like a login.

    Returns:
        The environment, and the scheduler that was detected.

    Raises:
        LaunchError: MPI runs on several machines, and no variable locates rank 0.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return environ, ""
    slurm = _slurm(environ)
    found = slurm or _open_mpi(environ) or _mpich(environ)
    if not found:
        return environ, ""
    merged = {
        **found,
        **{name: value for name, value in environ.items() if value or name not in found},
    }
    return merged, "slurm" if slurm else "mpi"


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the variables of a task of a job step; `sbatch` and `salloc` alone do not start tasks."""
    size = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_PROCID" not in environ or size in ("", "1"):
        return {}
    job = environ.get("SLURM_JOB_ID", "")
    step = environ.get("SLURM_STEP_ID", "")
    is_one_node = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("SLURM_LOCALID", ""),
        "GROUP_RANK": environ.get("SLURM_NODEID", ""),
        "MASTER_ADDR": LOOPBACK if is_one_node else first_host(nodes),
        "MASTER_PORT": _port(f"slurm {job}.{step}"),
    }


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ.get("OMPI_COMM_WORLD_SIZE", "")
    if size in ("", "1"):
        return {}
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE", "")
    # Address of mpirun itself: by default rank 0 runs there too.
    uri = re.search(r"tcp4?://([\d.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("OMPI_COMM_WORLD_LOCAL_RANK", ""),
        "LOCAL_WORLD_SIZE": environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""),
        "MASTER_ADDR": _mpi_master(
            environ, environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"), size, uri and uri[1]
        ),
        "MASTER_PORT": _port(f"mpi {job}"),
    }


def _mpich(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the variables of hydra, the common launcher of MPICH, Intel MPI and MVAPICH."""
    size = environ.get("PMI_SIZE", "")
    if size in ("", "1") or "MPI_LOCALNRANKS" not in environ:
        return {}
    return {
        "RANK": environ["PMI_RANK"],
        "WORLD_SIZE": size,
        "LOCAL_RANK": environ.get("MPI_LOCALRANKID", ""),
        "LOCAL_WORLD_SIZE": environ["MPI_LOCALNRANKS"],
        "MASTER_ADDR": _mpi_master(environ, environ["MPI_LOCALNRANKS"], size, None),
        "MASTER_PORT": _port(f"mpi {_hydra()}"),
    }


def _hydra() -> int:
    """Return the process id of hydra's proxy, which all ranks of one machine share: hydra does not name its runs.

    The proxy starts each rank in a session of its own, so it is the parent of the session's first process. The user's
    shell script may come between that process and this one.
    """
    leader = os.getsid(0)
    if leader == os.getpid():
        return os.getppid()
    try:
        return int(psutil.Process(leader).ppid())
    except (psutil.Error, OSError):
        return os.getppid()


def _mpi_master(
    environ: Mapping[str, str], local_size: str | None, size: str, guess: str | None
) -> str:
    given = environ.get("MASTER_ADDR")
    if given or local_size == size:
        return given or LOOPBACK
    if guess:
        return guess
    raise LaunchError(
        f"MPI has started {size} processes on several machines, and no variable locates rank 0",
        fix="Pass rank 0's machine and a free port there: mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 … "
        "(Open MPI: -x MASTER_ADDR=HOST -x MASTER_PORT=29500)",
    )


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed node list: "a[3-5,9],b" -> "a3"."""
    bracketed = re.match(r"([^,\[]*)\[([^\],-]*)[^\]]*\]([^,]*)", nodes)
    if bracketed:
        return first_host(bracketed[1] + bracketed[2] + bracketed[3])
    return nodes.split(",")[0]


def _port(run: str) -> str:
    """Derive a port from a run's name: equal in all of its processes, and rarely that of another run."""
    # crc32 and not `hash`, which differs between processes.
    return str(PORTS[zlib.crc32(run.encode()) % len(PORTS)])


StartedBy = Literal["samebits", "torchrun", "slurm", "mpi", "command line", "alone"]

# Set by Samebits's launcher for its workers.
LAUNCHED = "SAMEBITS_LAUNCHED"
# Secret that all processes of a run share.
KEY = "SAMEBITS_KEY"
# Set by a launcher whose processes recover in the step: the file that names the members, and this process's number.
VIEWS = "SAMEBITS_VIEWS"
MEMBER = "SAMEBITS_MEMBER"
SHORTEST_KEY = 16
FORMS = "tcp://HOST:PORT or env://"
_FIX_INIT = "Set {} to one of these forms."


@dataclass(frozen=True)
class RankAssignment:
    """Rank of one process in its world, as assigned by whatever started it."""

    rank: int  #: 0 <= rank < world_size.
    world_size: int  #: Number of processes.
    #: Rank among the processes of this machine; None if unknown until the rendezvous.
    local_rank: int | None
    local_world_size: int | None  #: Number of processes on this machine; None if unknown.
    init: str  #: Address of the rendezvous: tcp://HOST:PORT; empty for a world of one process.
    started_by: StartedBy  #: What started the processes.
    restart: int = 0  #: How often the launcher has restarted them.
    agent_store: bool = (
        False  #: Another process (torchrun's agent) serves the store at `init`, so rank 0 must not.
    )
    run_id: str = ""  #: Separates the keys of runs that share a store.
    # Not in the repr, which logs and tracebacks show.
    #: Secret that signs messages in the store; empty: messages are not signed.
    key: str = field(default="", repr=False)
    #: File of the launcher that names the members of the present world; empty: the members do not change.
    views: str = ""
    member: int = 0  #: Number of this process among all that the launcher has started.
    node: int | None = (
        None  #: Number of this machine, by the launcher or the scheduler; None if unknown.
    )


ALONE = RankAssignment(0, 1, 0, 1, "", "alone")


def is_in_world(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started as one rank of a world."""
    environ, _ = to_torchrun_env(environ)
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))


def read_assignment(
    environ: Mapping[str, str],
    init: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> RankAssignment | None:
    """Read this process's rank; None if it was not started as part of a world.

    Args:
        init: Value of `--init`; `env://` takes the address from MASTER_ADDR and MASTER_PORT.
        rank, world_size: Values of `--rank` and `--world-size`.

    Raises:
        LaunchError: A value is missing, is not a number, or contradicts another.
    """
    run_key(environ)  # checked even outside of a world: this process will start one
    if init is None and rank is None and world_size is None:
        return _from_environment(environ) if is_in_world(environ) else None
    if init is None:
        given = "--rank" if rank is not None else "--world-size"
        raise LaunchError(
            f"{given} was given without --init",
            fix=f"Add the address of the rendezvous: --init {FORMS}",
        )
    if init.rstrip("/") == "env:":
        return _from_environment(environ, rank, world_size)
    if rank is None or world_size is None:
        missing = "--rank" if rank is None else "--world-size"
        raise LaunchError(
            f"--init {init} was given without {missing}", fix=f"Add {missing} to the command."
        )
    return RankAssignment(
        rank=_checked_rank(rank, world_size, "--rank", "--world-size"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE"),
        init=check_init(init),
        started_by="command line",
        key=run_key(environ),
        node=_number(environ, "GROUP_RANK"),
    )


def show_one_machine(environ: MutableMapping[str, str]) -> None:
    """Let a script see all ranks as those of one machine, wherever they are: results may depend on these numbers."""
    environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"] = environ["RANK"], environ["WORLD_SIZE"]
    environ["GROUP_RANK"] = "0"


def node_number(environ: Mapping[str, str]) -> int | None:
    """Return the number of this machine, by the launcher or the scheduler; None if unknown."""
    return _number(to_torchrun_env(environ)[0], "GROUP_RANK")


def error_file(environ: Mapping[str, str]) -> str:
    """Return the file in which torchrun's agent looks for the error of this process; empty without torchrun."""
    return environ.get("TORCHELASTIC_ERROR_FILE", "")


def run_key(environ: Mapping[str, str]) -> str:
    """Return the secret in SAMEBITS_KEY; empty if it is not set. Raises LaunchError if it is too short for a secret."""
    key = environ.get(KEY, "").strip()
    if key and len(key) < SHORTEST_KEY:
        raise LaunchError(
            f"the environment's {KEY} has {len(key)} characters",
            allowed=f"{SHORTEST_KEY} or more",
            fix=f"On all machines, export {KEY} with the same output of: openssl rand -hex 32",
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
    port = _number(environ, "MASTER_PORT")
    if not host:
        _missing("MASTER_ADDR", environ)
    if port is None:
        _missing("MASTER_PORT", environ)
    local_rank = _number(environ, "LOCAL_RANK")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE")
    if local_rank is not None and local_world_size is not None:
        _checked_rank(local_rank, local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    started_by: StartedBy = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "command line"
    started_by = "samebits" if environ.get(LAUNCHED) else scheduler or started_by
    return RankAssignment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        init=check_init(
            f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}",
            "MASTER_ADDR/MASTER_PORT",
        ),
        started_by=started_by,
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        key=run_key(environ),
        views=environ.get(VIEWS, ""),
        member=_number(environ, MEMBER) or 0,
        node=_number(environ, "GROUP_RANK"),
    )


def command_for(assignment: RankAssignment, rank: int) -> str:
    """Return the command that starts another rank, by this process's own; empty if a launcher starts the ranks."""
    if assignment.started_by != "command line":
        return ""
    return command_option("--rank", rank) or f"RANK={rank} {_command(sys.argv[1:])}"


def command_option(option: str, value: int) -> str:
    """Return this process's command line with another value of an option; empty if it does not have the option."""
    args = sys.argv[1:]
    for index, arg in enumerate(args):
        if arg == option and index + 1 < len(args):
            return _command([*args[: index + 1], str(value), *args[index + 2 :]])
        if arg.startswith(f"{option}="):
            return _command([*args[:index], f"{option}={value}", *args[index + 1 :]])
    return ""


def _command(args: Sequence[str]) -> str:
    name = Path(sys.argv[0]).name
    return " ".join(
        [
            "samebits" if name in ("samebits", "__main__.py") else f"python {name}",
            *map(shlex.quote, args),
        ]
    )


def check_init(init: str, where: str = "--init") -> str:
    """Return `init` if it is a valid address of a rendezvous; `where` names its option or variable."""
    try:
        parts = urlsplit(init)
        host = parts.hostname
        port = parts.port
    except ValueError as error:
        raise LaunchError(
            f"{where} is {init}: {error}", allowed=FORMS, fix=_FIX_INIT.format(where)
        ) from None
    if parts.scheme == "tcp":
        if not host or not port:
            missing = "host" if not host else "port"
            raise LaunchError(
                f"{where} is {init}: it has no {missing}", allowed=FORMS, fix=f"Add the {missing}."
            )
        return init
    if parts.scheme == "file":
        address = f"tcp://{socket.gethostname()}:29500"
        raise LaunchError(
            f"{where} is {init}: processes do not meet in a file any more",
            allowed=FORMS,
            fix=f"If rank 0 runs on this machine, start all processes with --init {address}; otherwise with the name "
            "of rank 0's machine in it.",
        )
    raise LaunchError(
        f"{where} is {init}: not an address of a rendezvous",
        allowed=FORMS,
        fix=_FIX_INIT.format(where),
    )


def _number(environ: Mapping[str, str], name: str, given: int | None = None) -> int | None:
    text = environ.get(name)
    if given is not None or not text:
        return given
    try:
        value = int(text)
    except ValueError:
        raise LaunchError(
            f"the environment's {name} is {text!r}, not a whole number",
            fix=f"Set {name} to a whole number, or unset it.",
        ) from None
    if value < 0:
        raise LaunchError(
            f"the environment's {name} is {value}, below 0", fix=f"Set {name} to 0 or more."
        )
    return value


def _checked_rank(rank: int, world_size: int, rank_name: str, size_name: str) -> int:
    if world_size < 1:
        raise LaunchError(
            f"{size_name} is {world_size}",
            allowed="1 or more",
            fix=f"Set {size_name} to the number of processes.",
        )
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"{rank_name} is {rank}, but {size_name} is {world_size}",
            allowed=f"0 to {world_size - 1}",
            fix=f"Give each process its own {rank_name}, counted from 0.",
        )
    return rank


def _missing(name: str, environ: Mapping[str, str]) -> NoReturn:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    raise LaunchError(
        f"{name} is not set in the environment",
        given=" ".join(f"{key}={environ[key]}" for key in names if environ.get(key)),
        fix="Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none of them.",
    )
