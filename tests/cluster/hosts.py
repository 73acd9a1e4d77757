"""Several hosts on one machine: network namespaces on a bridge, each with an address and a name of its own.

Linux and root only. What listens on a host is reached from the others only over its link, which can be cut, restored
and slowed down.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BRIDGE = "lslab"
NET = "10.77.31"
# Enters a host: its network, a name of its own, and a hosts file in which all of them stand.
_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def why_not() -> str:
    """Why there can't be hosts here; empty if there can."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False)
    return "" if probe.returncode == 0 else "this machine lets nobody make network namespaces"


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name: Its host name, and the name of its network namespace.
        address: Its IPv4 address.
        table: The hosts file that all of them share.
    """

    name: str
    address: str
    table: Path

    def command(self, command: Sequence[object]) -> list[str]:
        """A command as it has to be given here to run there."""
        enter = ["nsenter", f"--net=/var/run/netns/{self.name}", "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", _ENTER, "sh", self.name, str(self.table), *map(str, command)]

    def start(self, *command: object, **options: Any) -> subprocess.Popen[str]:
        """Begin a command there, in a session of its own."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
        return subprocess.Popen(self.command(command), start_new_session=True, **options)

    def run(self, *command: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        options = {"capture_output": True, "text": True, "timeout": 110, "check": False, **options}
        return subprocess.run(self.command(command), **options)

    def cut(self) -> None:
        """Take its link down."""
        _ip("link", "set", f"ls-{self.name}", "down")

    def restore(self) -> None:
        """Bring its link up again."""
        _ip("link", "set", f"ls-{self.name}", "up")

    def block(self, port: int) -> None:
        """Let no answer out of a port, as a firewall does."""
        _ip("-n", self.name, "rule", "add", "ipproto", "tcp", "sport", str(port), "blackhole")

    def unblock(self, port: int) -> None:
        """Let answers out again."""
        _ip("-n", self.name, "rule", "del", "ipproto", "tcp", "sport", str(port), "blackhole")

    def slow(self, megabits: int) -> None:
        """Hold what it sends to so many Mbit/s."""
        shape = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms"]
        _call("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)

    def unslow(self) -> None:
        """Let it send as fast as it can again."""
        _call("ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", "eth0", "root")


@contextmanager
def hosts(num_hosts: int, folder: Path) -> Iterator[list[Host]]:
    """Make hosts n1, n2, ...; at the end they, and every process in them, are gone.

    Args:
        num_hosts: How many.
        folder: Where to put the file with their names.
    """
    table = folder / "hosts"
    made = [Host(f"n{number}", f"{NET}.{number}", table) for number in range(1, num_hosts + 1)]
    lines = [f"{host.address} {host.name}" for host in made]
    table.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", f"{NET}.254 bridge", *lines, ""]))
    # Names and addresses are the machine's: a second laboratory waits for the first.
    with (Path(tempfile.gettempdir()) / f"{BRIDGE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _built(made)


def _built(made: list[Host]) -> Iterator[list[Host]]:
    _remove(made)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{NET}.254/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for host in made:
            _join(host)
        yield made
    finally:
        _remove(made)


def _join(host: Host) -> None:
    outside = f"ls-{host.name}"
    _ip("netns", "add", host.name)
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _ip("link", "set", outside, "master", BRIDGE, "up")
    _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", host.name, "link", "set", "eth0", "up")
    _ip("-n", host.name, "link", "set", "lo", "up")


def _remove(made: Sequence[Host]) -> None:
    for host in made:
        inside = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False)
        for pid in inside.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        # The kernel takes its time over a namespace, and its link with it.
        subprocess.run(["ip", "link", "del", f"ls-{host.name}"], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
