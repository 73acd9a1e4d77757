"""Open the store through which ranks find each other: served by rank 0, by torchrun's agent, or a shared file.

torch's store clients block for minutes and then print stack traces. Plain sockets therefore detect the common faults
first: an unknown host, a port in use, no listener.
"""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import Store, TCPStore

from samebits.cluster.address import is_local_address, port_holder, split_endpoint, store_address
from samebits.cluster.env import RankAssignment, command_for, command_option
from samebits.cluster.file_store import open_file_store
from samebits.cluster.signed import peek
from samebits.cluster.timeout import REPORT_EVERY_S, as_clock, call_with_timeout
from samebits.config.process_range import RendezvousConfig
from samebits.errors import LaunchError

HANDSHAKE_S = 20.0
# Marker that rank 0 writes into the store that it serves, and how long that may take after it has opened the port.
SERVED = "samebits/served"
SERVED_S = 10.0
# Timeout of the launchers' store for its own clients.
SERVE_S = 60.0
# Retries while the name server is temporarily unavailable.
LOOKUP_S = 10.0


def open_store(assignment: RankAssignment, timeout_s: float, report: Callable[[str], None]) -> Store:
    """Open the store at the assignment's address; ranks other than 0 wait until rank 0 serves it.

    Raises:
        LaunchError: The store cannot be served or reached, or belongs to another program.
    """
    parts = urlsplit(assignment.init)
    if parts.scheme == "file":
        return open_file_store(Path(parts.path), assignment)
    host, port = str(parts.hostname), int(parts.port or 0)
    addresses = resolve_host(host, port, assignment.init)
    if assignment.rank == 0 and not assignment.agent_store:
        _check_local(host, addresses, assignment.init, "rank 0", "--init")
        mine = serve_store(host, port, assignment.init, timeout_s)
        mine.set(SERVED, "rank 0")
        return mine
    wait_for_listener(
        host, port, assignment.init, timeout_s, report, f"rank {assignment.rank}", "rank 0", command_for(assignment, 0)
    )
    store = connect(host, port, assignment.init, timeout_s, "rank 0")
    # Verified before anything is written to it: rank 0 of a Samebits run serves the store.
    end = time.monotonic() + SERVED_S
    while not assignment.agent_store and peek(store, SERVED) is None:
        if time.monotonic() > end:
            raise LaunchError(
                f"the store at {assignment.init} does not belong to a run of Samebits",
                given=port_holder(port),
                cause="torchrun or another program serves it",
                fix="Choose another port, the same for all processes, or end that program.",
            )
        time.sleep(0.01)
    return store


def open_for_nodes(nodes: RendezvousConfig, report: Callable[[str], None]) -> tuple[Store, bool]:
    """Open the store of the launchers of several machines, and return whether this launcher serves it.

    With node ranks, node rank 0 serves it; otherwise the first launcher on the endpoint's machine.

    Raises:
        LaunchError: The store cannot be served or reached.
    """
    host, port = split_endpoint(nodes.endpoint)
    addresses = resolve_host(host, port, nodes.endpoint)
    if nodes.rank == 0:
        _check_local(host, addresses, nodes.endpoint, "node rank 0", "--master")
        return serve_store(host, port, nodes.endpoint, SERVE_S, "node rank 0"), True
    me, whom, store = f"node {socket.gethostname()}", "the rendezvous", "a rendezvous"
    if nodes.rank is not None:
        me, whom, store = f"node rank {nodes.rank} ({socket.gethostname()})", "node rank 0", "node rank 0"
    elif any(is_local_address(address) for address in addresses):
        with suppress(LaunchError):  # another launcher of this machine serves it already
            return serve_store(host, port, nodes.endpoint, SERVE_S), True
    command = command_option("--node-rank", 0)
    wait_for_listener(host, port, nodes.endpoint, nodes.join_timeout_s, report, me, whom, command)
    return connect(host, port, nodes.endpoint, nodes.join_timeout_s, store), False


def resolve_host(host: str, port: int, init: str) -> list[str]:
    """Resolve a host name to its IP addresses. Raises LaunchError if the name cannot be resolved."""
    end = time.monotonic() + LOOKUP_S
    while True:
        try:
            return sorted({str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
        except (socket.gaierror, UnicodeError) as error:
            passing = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
            if not passing or time.monotonic() > end:
                raise LaunchError(
                    f"host {host!r} is unknown: {error}",
                    given=init,
                    fix=f"Use an IP address, or add the name to /etc/hosts on {socket.gethostname()}.",
                ) from None
            time.sleep(1.0)


def _check_local(host: str, addresses: list[str], init: str, name: str, option: str) -> None:
    if not any(is_local_address(address) for address in addresses):
        raise LaunchError(
            f"{name} must run on {host}, but this is {socket.gethostname()}",
            given=init,
            where=f"{host} is {', '.join(addresses)}, not an address of this machine",
            fix=f"Start {name} on {host}, or set {option} to this machine's name on all machines.",
        )


def serve_store(host: str, port: int, init: str, timeout_s: float, name: str = "rank 0") -> TCPStore:
    """Serve a store to the other processes. Raises LaunchError if the port is in use, or cannot be listened on."""
    try:
        listener = _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = port_holder(port)
            raise LaunchError(
                f"port {port} is in use" + (f" by {holder}" if holder else ""),
                given=init,
                cause=f"another run uses it, or a second process was started with {name}",
                fix="Choose another port, the same on all machines, or end that process.",
            ) from None
        raise LaunchError(
            f"{name} can't listen on port {port}: {error.strerror}",
            given=init,
            fix="Choose another port, the same on all machines.",
        ) from None
    address, seconds = str(listener.getsockname()[0]), timedelta(seconds=timeout_s)
    # `detach`: the socket object must not close what torch's store uses.
    return TCPStore(address, port, None, True, seconds, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen(host: str, port: int) -> socket.socket:
    """Listen only on the address that the other processes are given."""
    address = store_address(host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Otherwise the port of an ended run is in use for another minute, while its connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def wait_for_listener(
    host: str,
    port: int,
    init: str,
    timeout_s: float,
    report: Callable[[str], None],
    name: str,
    peer: str,
    command: str = "",
) -> None:
    """Wait until a process listens at an address; `command`: the one that starts that process, if known.

    Raises:
        LaunchError: No process listens there in time.
    """
    start = time.monotonic()
    next_report_s, pause_s = REPORT_EVERY_S, 0.01
    address = store_address(host, port)
    while True:
        waited = time.monotonic() - start
        try:
            socket.create_connection((address, port), timeout=max(0.1, min(5.0, timeout_s - waited))).close()
            return
        except OSError as error:
            reason = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        waited = time.monotonic() - start
        if waited >= timeout_s:
            raise LaunchError(
                f"{name} waited {waited:.0f} s for {peer} at {init}: {reason}",
                where="cluster.join_timeout_s",
                cause=f"{peer} is not running there, or a firewall is between",
                fix=f"Run on {host}: {command}" if command else f"Start {peer}, or open the port {port} on {host}.",
            )
        if waited >= next_report_s:
            next_report_s += REPORT_EVERY_S
            report(
                f"{name} waits for {peer} at {init}: {reason}, {waited:.0f} s\n"
                + (f"  on its machine:  {command}\n" if command else "")
                + f"  giving up in {as_clock(timeout_s - waited)} (cluster.join_timeout_s)"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.5)


def connect(host: str, port: int, init: str, timeout_s: float, peer: str) -> Store:
    """Connect to a store, in a thread: torch waits forever for the answer of a listener that is not a store.

    Raises:
        LaunchError: The listener is not a store, or has ended.
    """
    address, seconds, looked_s = store_address(host, port), timedelta(seconds=timeout_s), 0.0

    def check(waited_s: float) -> None:
        nonlocal looked_s
        if waited_s >= looked_s + min(0.5, HANDSHAKE_S):
            looked_s = waited_s
            try:
                socket.create_connection((host, port), timeout=5.0).close()
            except ConnectionRefusedError:
                fix = f"Read the output of {peer}."
                raise LaunchError(f"lost {peer} at {init} while connecting to it", fix=fix) from None
            except OSError:
                pass  # it is busy, or the link is slow

    limit_s = min(HANDSHAKE_S, timeout_s)
    try:
        return call_with_timeout(
            lambda: TCPStore(address, port, None, False, seconds, wait_for_workers=False), limit_s, check
        )
    except TimeoutError:
        reason = f"no answer in {limit_s:.0f} s"
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
    raise LaunchError(
        f"something listens at {init}, but it is not {peer}: {reason}",
        given=port_holder(port),
        fix="Choose another port, the same on all machines.",
    )
