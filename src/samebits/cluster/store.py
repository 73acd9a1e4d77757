"""Open the store through which ranks find each other: served by rank 0, or by torchrun's agent.

torch's store clients block for minutes and then print stack traces. Plain sockets therefore detect the common faults
first: an unknown host, a port in use, no listener.
"""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import Store, TCPStore

from samebits.cluster.address import is_local_address, port_holder, split_endpoint, store_address
from samebits.cluster.env import RankAssignment, command_for, command_option
from samebits.cluster.signed import SignedStore, peek
from samebits.cluster.timeout import REPORT_EVERY_S, as_clock, call_with_timeout, wait_until
from samebits.errors import LaunchError
from samebits.process_range import RendezvousConfig

# Separate the successive worlds of a job on one store, as torchrun's agent keeps a single store for all of them.
#
# When only the membership changes, torchrun sets no variable that distinguishes one world from the next. Each process
# therefore registers its arrival, and rank 0 admits all arrivals into a new generation:
#
#     every process   add("arrivals", 1) -> this process's arrival number
#     rank 0          add("generations", 1), put("generation", [number, num_arrivals]), again after each arrival
#     other ranks     poll "generation" until num_arrivals covers their own arrival
#
# Processes of an earlier generation have ended, so they never read the new number.


# The other ranks give up this much later than rank 0: its error names the missing rank, so it must be the one shown.
SLACK_S = 3.0


class Generations:
    """The generation of this process: one world of the job. It has `timeout_s` from `start`, by `time.monotonic`."""

    def __init__(
        self, assignment: RankAssignment, store: SignedStore, start: float, timeout_s: float
    ) -> None:
        self._rank = assignment.rank
        self._store = store
        self._end = start + timeout_s
        self._timeout_s = timeout_s
        self._arrival = store.store.add("arrivals", 1)
        self._num_admitted = 0
        self._generation = 0

    def find_generation(self) -> int:
        """Return the number of this process's generation, from 1; ranks other than 0 wait for rank 0.

        Raises:
            LaunchError: Rank 0 has not joined within the timeout.
        """
        if self._rank == 0:
            self._generation = self._store.store.add("generations", 1)
            self.announce()
            return self._generation
        while (number := generation_of(self._store.get("generation"), self._arrival)) is None:
            if time.monotonic() > self._end + SLACK_S:
                raise LaunchError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank 0, which did not join",
                    where="cluster.join_timeout_s",
                    fix="Start rank 0, or read its output to see why it ended.",
                )
            time.sleep(0.01)
        return number

    def announce(self) -> None:
        """Admit the processes that have arrived since the last call. Only rank 0 calls this."""
        # Adding 0 reads the counter, where `get` would wait for a key that does not exist.
        num_arrivals = self._store.store.add("arrivals", 0)
        if num_arrivals != self._num_admitted:
            self._store.put("generation", [self._generation, num_arrivals])
            self._num_admitted = num_arrivals


def generation_of(announced: Any, arrival: int) -> int | None:
    """Return the generation that admits an arrival number; None if it is not admitted or the value is malformed."""
    if not isinstance(announced, list) or [type(item) for item in announced] != [int, int]:
        return None
    generation, num_arrivals = announced
    return generation if num_arrivals >= arrival else None


HANDSHAKE_S = 20.0
# Marker that rank 0 writes into the store that it serves, and how long that may take after it has opened the port.
SERVED = "samebits/served"
SERVED_S = 10.0
# Timeout of the launchers' store for its own clients.
SERVE_S = 60.0
# Retries while the name server is temporarily unavailable.
LOOKUP_S = 10.0


def open_store(
    assignment: RankAssignment, timeout_s: float, report: Callable[[str], None]
) -> Store:
    """Open the store at the assignment's address; ranks other than 0 wait until rank 0 serves it.

    Raises:
        LaunchError: The store cannot be served or reached, or belongs to another program.
    """
    parts = urlsplit(assignment.init)
    host = str(parts.hostname)
    port = int(parts.port or 0)
    addresses = resolve_host(host, port, assignment.init)
    if assignment.rank == 0 and not assignment.agent_store:
        _check_local(host, addresses, assignment.init, "rank 0", "--init")
        mine = serve_store(host, port, assignment.init, timeout_s)
        mine.set(SERVED, "rank 0")
        return mine
    wait_for_listener(
        host,
        port,
        assignment.init,
        timeout_s,
        report,
        f"rank {assignment.rank}",
        "rank 0",
        command_for(assignment, 0),
    )
    store = connect(host, port, assignment.init, timeout_s, "rank 0")
    # Verified before anything is written to it: rank 0 of a Samebits run serves the store.
    is_served = assignment.agent_store or wait_until(
        lambda: peek(store, SERVED) is not None, SERVED_S, 0.01
    )
    if not is_served:
        raise LaunchError(
            f"the store at {assignment.init} does not belong to a run of Samebits",
            given=port_holder(port),
            cause="torchrun or another program serves it",
            fix="Choose another port, the same for all processes, or end that program.",
        )
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
        _check_local(host, addresses, nodes.endpoint, "node rank 0", "--rdzv-endpoint")
        return serve_store(host, port, nodes.endpoint, SERVE_S, "node rank 0"), True
    me = f"node {socket.gethostname()}"
    whom = "the rendezvous"
    store = "a rendezvous"
    if nodes.rank is not None:
        me = f"node rank {nodes.rank} ({socket.gethostname()})"
        whom = "node rank 0"
        store = "node rank 0"
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
            return sorted(
                {
                    str(item[4][0])
                    for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                }
            )
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


def serve_store(
    host: str, port: int, init: str, timeout_s: float, name: str = "rank 0"
) -> TCPStore:
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
    address = str(listener.getsockname()[0])
    seconds = timedelta(seconds=timeout_s)
    # `detach`: the socket object must not close what torch's store uses.
    return TCPStore(
        address,
        port,
        None,
        True,
        seconds,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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
    next_report_s = REPORT_EVERY_S
    pause_s = 0.01
    address = store_address(host, port)
    while True:
        waited = time.monotonic() - start
        try:
            socket.create_connection(
                (address, port), timeout=max(0.1, min(5.0, timeout_s - waited))
            ).close()
            return
        except OSError as error:
            reason = (
                "no answer"
                if isinstance(error, TimeoutError)
                else (error.strerror or str(error)).lower()
            )
        waited = time.monotonic() - start
        if waited >= timeout_s:
            raise LaunchError(
                f"{name} waited {waited:.0f} s for {peer} at {init}: {reason}",
                where="cluster.join_timeout_s",
                cause=f"{peer} is not running there, or a firewall is between",
                fix=f"Run on {host}: {command}"
                if command
                else f"Start {peer}, or open the port {port} on {host}.",
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
    address = store_address(host, port)
    seconds = timedelta(seconds=timeout_s)
    looked_s = 0.0

    def check(waited_s: float) -> None:
        nonlocal looked_s
        if waited_s >= looked_s + min(0.5, HANDSHAKE_S):
            looked_s = waited_s
            try:
                socket.create_connection((host, port), timeout=5.0).close()
            except ConnectionRefusedError:
                fix = f"Read the output of {peer}."
                raise LaunchError(
                    f"lost {peer} at {init} while connecting to it", fix=fix
                ) from None
            except OSError:
                pass  # it is busy, or the link is slow

    limit_s = min(HANDSHAKE_S, timeout_s)
    try:
        return call_with_timeout(
            lambda: TCPStore(address, port, None, False, seconds, wait_for_workers=False),
            limit_s,
            check,
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
