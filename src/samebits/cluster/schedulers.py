"""Translate the variables of Slurm and MPI into torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR ...

Only this module and `env.py` read these variables. Nothing here imports torch.
"""

import os
import re
import zlib
from collections.abc import Mapping
from typing import Literal

import psutil

from samebits.errors import LaunchError

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
    merged = {**found, **{name: value for name, value in environ.items() if value or name not in found}}
    return merged, "slurm" if slurm else "mpi"


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Read the variables of a task of a job step; `sbatch` and `salloc` alone do not start tasks."""
    size = environ.get("SLURM_STEP_NUM_TASKS", "")
    if "SLURM_PROCID" not in environ or size in ("", "1"):
        return {}
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
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
        "MASTER_ADDR": _mpi_master(environ, environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"), size, uri and uri[1]),
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


def _mpi_master(environ: Mapping[str, str], local_size: str | None, size: str, guess: str | None) -> str:
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
