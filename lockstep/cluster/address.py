"""Addresses, ports and interfaces of this machine. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from pathlib import Path
from urllib.parse import urlsplit


class ReservedPort:
    """A TCP port of this machine that nobody listens on, kept free for a process that is still to come.

    The system gives it to no program that asks for any port; who asks for it by its number may listen on it, as the one
    who keeps it does not. So another run that starts at the same time can't take it in between.
    """

    def __init__(self) -> None:
        self._keeper: socket.socket | None = None

    def renew(self, host: str = "127.0.0.1") -> int:
        """Keep another one, at an address of this machine or at all of them (""), instead of the last."""
        self.close()
        self._keeper = socket.socket()
        self._keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._keeper.bind((host, 0))
        port = int(self._keeper.getsockname()[1])
        if not sys.platform.startswith("linux"):  # other systems would let nobody listen there
            self.close()
        return port

    def close(self) -> None:
        """Keep none any more."""
        if self._keeper is not None:
            self._keeper.close()


def is_local_address(address: str) -> bool:
    """Whether an IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def store_address(host: str, port: int) -> str:
    """Where a store for `host` listens, and where this machine reaches it: one address, and never all of them.

    A machine's own name is often 127.0.1.1 to itself, where other machines can't reach it. It then stands for the
    address by which this machine reaches others.

    Returns:
        An address of this machine, or `host` where that is another machine.
    """
    try:
        found = {str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return host
    mine = sorted(
        (address for address in found if is_local_address(address)), key=lambda address: (":" in address, address)
    )
    outward = [address for address in mine if not _is_loopback(address)]
    if outward:
        return outward[0]
    is_own_name = host.lower() in (name := socket.gethostname().lower(), name.partition(".")[0])
    if is_own_name and mine and all(map(_is_loopback, found)):
        return address_towards("192.0.2.1", 9) or address_towards("2001:db8::1", 9) or mine[0]
    return mine[0] if mine else host


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def network() -> str:
    """What all processes have in common that reach each other over 127.0.0.1; empty if it can't be known."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}" if is_local_address("127.0.0.1") else ""
    return ""


def port_holder(port: int) -> str:
    """Who listens on a TCP port of this machine: `pid 4123 (python -m http.server)`; empty if it can't be known.

    From /proc, so on Linux only, and only for processes that this user may look into.
    """
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and _holds(process, wanted):
            return f"pid {process.name} ({command_of(int(process.name))})"
    return ""


def command_of(pid: int) -> str:
    """A process's command line, shortened; empty if it can't be known."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    text = " ".join(word for word in words if word)
    return text if len(text) <= 80 else text[:77] + "..."


def _holds(process: Path, wanted: set[str]) -> bool:
    try:
        handles = list((process / "fd").iterdir())
    except OSError:
        return False
    for handle in handles:
        # A file may be closed between being listed and being read.
        with contextlib.suppress(OSError):
            if os.readlink(handle) in wanted:
                return True
    return False


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="utf-8").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            # Field 1 is ADDRESS:PORT in hex, field 3 the state (0A: listening), field 9 the socket's inode.
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def interface_towards(init: str) -> str:
    """The network interface by which this machine reaches the host of `tcp://HOST:PORT`; empty if it can't be known.

    A file:// meeting place is taken to be on this machine only if nothing better is known, so it names none.
    """
    parts = urlsplit(init)
    if parts.scheme != "tcp" or not sys.platform.startswith("linux"):
        return ""
    port = int(parts.port or 0)
    mine = address_towards(store_address(str(parts.hostname), port), port)
    if _is_loopback(mine):
        return "lo"
    return next((name for _, name in socket.if_nameindex() if mine and _ipv4_of(name) == mine), "")


def link_speed(init: str) -> float | None:
    """What the network info towards `tcp://HOST:PORT` says it can carry, bit/s; None if it does not say."""
    name = interface_towards(init)
    try:
        megabits = (
            int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="utf-8")) if name and name != "lo" else -1
        )
    except (OSError, ValueError):
        return None
    return megabits * 1e6 if megabits > 0 else None


def address_towards(host: str, port: int) -> str:
    """This machine's address as `host` sees it; empty if it can't be known."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: connecting a datagram socket only picks the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _ipv4_of(interface: str) -> str:
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
