"""IP addresses, ports and network interfaces of this machine. This module does not import torch."""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import psutil

from samebits.scratch import boot_id


class ReservedPort:
    """A TCP port of this machine, reserved for a process that starts later.

    The socket is bound but does not listen. Linux then never assigns the port to a program that binds to port 0, while
    a program that binds to this port number with SO_REUSEADDR may listen on it. So a second run that starts at the same
    time cannot take the port.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def renew(self, host: str = "127.0.0.1") -> int:
        """Release the reserved port, if any, and reserve and return another; `host` may be "" for all addresses."""
        self.close()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        port = int(self._socket.getsockname()[1])
        if not sys.platform.startswith(
            "linux"
        ):  # on other systems no process could listen on a bound port
            self.close()
        return port

    def close(self) -> None:
        """Release the port."""
        if self._socket is not None:
            self._socket.close()


def is_local_address(address: str) -> bool:
    """Return whether an IP address belongs to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def store_address(host: str, port: int) -> str:
    """Resolve a host to the one address at which its store listens and clients connect.

    A machine often resolves its own name to 127.0.1.1, which other machines cannot reach. In that case, the address by
    which this machine reaches others is used.

    Returns:
        An address of this machine, or `host` itself if it is another machine.
    """
    try:
        found = {
            str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except (OSError, UnicodeError):
        return host
    # In a fixed order, since the store and its clients on this machine have to find the same address.
    own = sorted(filter(is_local_address, found), key=lambda address: (":" in address, address))
    outward = [address for address in own if not _is_loopback(address)]
    if outward:
        return outward[0]
    is_own_name = host.lower() in (name := socket.gethostname().lower(), name.partition(".")[0])
    if is_own_name and own and all(map(_is_loopback, found)):
        return address_towards("192.0.2.1", 9) or address_towards("2001:db8::1", 9) or own[0]
    return own[0] if own else host


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split HOST:PORT into host and port."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def network() -> str:
    """Return an identifier shared by processes that can reach each other over 127.0.0.1; empty if unknown."""
    with contextlib.suppress(OSError):
        if (boot := boot_id()) and is_local_address("127.0.0.1"):
            return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return ""


def machine(node: int | None) -> str:
    """Return an identifier shared by the processes of a machine; `node`: its number, None: it has its own network."""
    return (network() or socket.gethostname()) if node is None else f"node {node}"


def numbered(machines: Sequence[str]) -> tuple[int, ...]:
    """Return for each rank the number of its machine, in the order of their first ranks, given the identifiers."""
    numbers = {each: number for number, each in enumerate(dict.fromkeys(machines))}
    return tuple(numbers[each] for each in machines)


def port_holder(port: int) -> str:
    """Describe the process that listens on a TCP port of this machine: `pid 4123 (python -m http.server)`.

    Empty if it is unknown: for example a process that this user may not inspect.
    """
    try:
        # `net_connections` leaves out the pid of other users' sockets, and on macOS needs root.
        found = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    for each in found:
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid is not None:
            return f"pid {each.pid} ({command_of(each.pid)})"
    return ""


def command_of(pid: int) -> str:
    """Return a process's command line, at most 80 characters; empty if unknown."""
    try:
        arguments = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return ""
    text = " ".join(" ".join(arguments).split())  # of python -c, an argument has many lines
    return text if len(text) <= 80 else text[:77] + "..."


def interface_towards(init: str) -> str:
    """Return the network interface by which this machine reaches the host of `tcp://HOST:PORT`; empty if unknown.

    An address of another form does not name a host, so the result is empty.
    """
    parts = urlsplit(init)
    if parts.scheme != "tcp" or not sys.platform.startswith("linux"):
        return ""
    port = int(parts.port or 0)
    own = address_towards(store_address(str(parts.hostname), port), port)
    if _is_loopback(own):
        return "lo"
    try:
        interfaces = psutil.net_if_addrs()
    except (psutil.Error, OSError):
        return ""
    return next(
        (
            name
            for name, entries in interfaces.items()
            if own in [entry.address for entry in entries]
        ),
        "",
    )


def link_speed(init: str) -> float | None:
    """Return the nominal speed of the network interface towards `tcp://HOST:PORT`, bit/s; None if unknown."""
    name = interface_towards(init)
    try:
        megabits = psutil.net_if_stats()[name].speed if name != "lo" else 0
    except (KeyError, psutil.Error, OSError):
        return None
    return megabits * 1e6 if megabits > 0 else None  # 0: the driver does not report it, as for veth


def address_towards(host: str, port: int) -> str:
    """Return this machine's address as seen from a host, by its name or IP address; empty if unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Nothing is sent: connecting a datagram socket only picks the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
