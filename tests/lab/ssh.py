"""Real ssh servers, one on each host, with a key made for the test."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Host

SSHD = "/usr/sbin/sshd"


def why_not() -> str:
    """Why there can't be ssh servers here; empty if there can."""
    missing = [name for name in (SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"needs {', '.join(missing)} (Debian: openssh-server, openssh-client)" if missing else ""


@contextmanager
def servers(hosts: Sequence[Host], folder: Path) -> Iterator[Path]:
    """Start them; gives a folder with an `ssh` that uses the key, to be put first in PATH."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    keys = folder / "authorized_keys"
    keys.write_bytes((folder / "key.pub").read_bytes())
    Path("/run/sshd").mkdir(exist_ok=True)
    options = [f"HostKey={folder}/host_key", f"AuthorizedKeysFile={keys}", "StrictModes=no", "UsePAM=no"]
    options += ["PermitRootLogin=yes", "PidFile=none"]
    arguments = [part for option in options for part in ("-o", option)]
    running = [host.start(SSHD, "-D", "-e", "-f", "/dev/null", *arguments) for host in hosts]
    place = folder / "bin"
    place.mkdir()
    client = f"exec {shutil.which('ssh')} -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    (place / "ssh").write_text(f'#!/bin/sh\n{client} -o LogLevel=ERROR "$@"\n')
    (place / "ssh").chmod(0o755)
    try:
        _wait_until_open(hosts, place)
        yield place
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _wait_until_open(hosts: Sequence[Host], place: Path) -> None:
    end = time.monotonic() + 90
    for host in hosts:
        # From the first host: there the names are known.
        while hosts[0].run(place / "ssh", host.name, "true").returncode:
            assert time.monotonic() < end, f"no ssh server on {host.name}"
            time.sleep(0.2)
