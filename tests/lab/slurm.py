"""A real Slurm on two hosts: munged and slurmctld here, slurmd on each."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.hosts import NET, Host

NEEDED = ("slurmctld", "slurmd", "srun", "sbatch", "munged")


def why_not() -> str:
    """Why there can't be a Slurm here; empty if there can."""
    missing = [name for name in NEEDED if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
    return f"needs {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else ""


class Slurm:
    """The running cluster.

    Attributes:
        hosts: Its nodes.
        folder: Its configuration and logs.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    @property
    def environ(self) -> dict[str, str]:
        """Variables with which Slurm's commands find it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: object, timeout: float = 110, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands, or anything else, with the cluster known."""
        return subprocess.run(
            list(map(str, command)), env={**self.environ, **more}, capture_output=True, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip

    def start(self, *command: object, **more: str) -> subprocess.Popen[str]:
        """Begin one."""
        return subprocess.Popen(
            list(map(str, command)), env={**self.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip


@contextmanager
def slurm(hosts: Sequence[Host], folder: Path) -> Iterator[Slurm]:
    """Start a cluster whose nodes are the hosts; at the end nothing of it runs."""
    cluster = Slurm(hosts, folder)
    for name in ("state", "log", *(f"spool-{host.name}" for host in hosts)):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(_conf(hosts, folder))
    started: list[subprocess.Popen[Any]] = []
    try:
        started.append(_munged())
        started.append(_daemon(["/usr/sbin/slurmctld", "-D"], cluster, "slurmctld"))
        for host in hosts:
            command = host.command(["/usr/sbin/slurmd", "-D", "-N", host.name])
            started.append(_daemon(command, cluster, f"slurmd-{host.name}"))
        _wait_until_idle(cluster)
        yield cluster
    finally:
        cluster.run("scancel", "--full", "--signal=KILL", "--state=RUNNING", timeout=20)
        for process in reversed(started):
            _end(process)


def _conf(hosts: Sequence[Host], folder: Path) -> str:
    lines = [
        "ClusterName=lab",
        f"SlurmctldHost={os.uname().nodename}({NET}.254)",
        "AuthType=auth/munge",
        "AuthInfo=cred_expire=5",  # a job that queues itself again waits for so long
        "SlurmUser=root",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "ReturnToService=2",
        "MpiDefault=none",
        "SlurmctldPort=46817",
        "SlurmdPort=46818",
        "KillWait=5",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0",
        "MinJobAge=300",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        *(f"NodeName={host.name} NodeAddr={host.address} CPUs=2 RealMemory=2000 State=UNKNOWN" for host in hosts),
        f"PartitionName=lab Nodes={','.join(host.name for host in hosts)} Default=YES MaxTime=INFINITE State=UP",
    ]
    return "\n".join([*lines, ""])


def _munged() -> subprocess.Popen[Any]:
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    return subprocess.Popen(
        ["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground", "--force"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _daemon(command: list[str], cluster: Slurm, name: str) -> subprocess.Popen[Any]:
    log = (cluster.folder / "log" / f"{name}.out").open("w")
    with log:
        return subprocess.Popen(command, env=cluster.environ, stdout=log, stderr=log, start_new_session=True)


def _wait_until_idle(cluster: Slurm) -> None:
    end = time.monotonic() + 120
    while True:
        told = cluster.run("sinfo", "-h", "-o", "%T %D").stdout.split()
        if told == ["idle", str(len(cluster.hosts))]:
            return
        assert time.monotonic() < end, f"sinfo says {told}; logs are in {cluster.folder}/log"
        time.sleep(0.3)


def _end(process: subprocess.Popen[Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                continue
