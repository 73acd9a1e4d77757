"""Slurm's and MPI's variables in the words of torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.

With `env.py` the only file that reads them. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lockstep.errors import LaunchError

LOOPBACK = "127.0.0.1"
# Below what systems give away for outgoing connections (32768 and up), above what needs root.
PORTS = range(10_000, 30_000)


Scheduler = Literal["slurm", "mpi", ""]


def to_torchrun_env(environ: Mapping[str, str]) -> tuple[Mapping[str, str], Scheduler]:
    """The environment with torchrun's variables in it, where srun or mpirun has started several processes; and which.

    What is set already wins: torchrun inside of srun, or a person's own MASTER_ADDR. A step of one task is no world, so
    that `srun --pty bash` is as good as a login.

    Raises:
        LaunchError: MPI runs on several machines, and nothing says where rank 0 is.
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
    """A task of a job step; `sbatch` and `salloc` alone start none."""
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
        "MASTER_ADDR": LOOPBACK if is_one_node else first_host(nodes),
        "MASTER_PORT": _port(f"slurm {job}.{step}"),
    }


def _open_mpi(environ: Mapping[str, str]) -> dict[str, str]:
    size = environ.get("OMPI_COMM_WORLD_SIZE", "")
    if size in ("", "1"):
        return {}
    job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE", "")
    # Where mpirun itself is: by default rank 0 is there too.
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
    """MPICH, Intel MPI and MVAPICH: their common launcher, hydra."""
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
    """What the processes of one machine have in common, since hydra gives a run no name: the process that started them.

    It starts each in a session of its own, so it is the parent of the session's first process; in between there may be
    a person's shell script.
    """
    leader = os.getsid(0)
    if leader == os.getpid():
        return os.getppid()
    try:
        # The command's name, in brackets, may hold spaces.
        return int(Path(f"/proc/{leader}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return os.getppid()


def _mpi_master(environ: Mapping[str, str], local_size: str | None, size: str, guess: str | None) -> str:
    given = environ.get("MASTER_ADDR")
    if given or local_size == size:
        return given or LOOPBACK
    if guess:
        return guess
    raise LaunchError(
        f"MPI has started {size} processes on several machines, and nothing says where rank 0 is",
        fix="name its machine and a free port there: mpirun -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 … "
        "(Open MPI: -x MASTER_ADDR=HOST -x MASTER_PORT=29500)",
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes: "a[3-5,9],b" -> "a3"."""
    bracketed = re.match(r"([^,\[]*)\[([^\],-]*)[^\]]*\]([^,]*)", nodes)
    if bracketed:
        return first_host(bracketed[1] + bracketed[2] + bracketed[3])
    return nodes.split(",")[0]


def _port(run: str) -> str:
    """A port that all processes of a run work out by themselves, and that other runs on the machine rarely have."""
    return str(PORTS[zlib.crc32(run.encode()) % len(PORTS)])
