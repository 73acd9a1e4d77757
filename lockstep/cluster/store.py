"""Opens the store that processes meet in: served by rank 0, by torchrun's agent, or a file.

torch's own store clients wait for minutes and then print stack traces, so what can be found out with a plain socket is
found out before: a host that nobody knows, a port in use, nobody answering.
"""

from __future__ import annotations

import errno
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch._C._distributed_c10d import Store, TCPStore

from lockstep.cluster.address import is_local_address, port_holder, store_address
from lockstep.cluster.env import RankAssignment
from lockstep.cluster.file_store import open_file_store
from lockstep.cluster.signed import peek
from lockstep.config.process_range import RendezvousConfig
from lockstep.errors import LaunchError

REPORT_EVERY_S = 5.0
HANDSHAKE_S = 20.0
# Rank 0 leaves this in the store that it serves. How long it may take from opening its port to that.
SERVED = "lockstep/served"
SERVED_S = 10.0
# How long the store of several machines' launchers may be away from its own clients.
SERVE_S = 60.0
# A name server that is away for a moment.
LOOKUP_S = 10.0


def open_store(assignment: RankAssignment, timeout_s: float, report: Callable[[str], None]) -> Store:
    """The store at the assignment's address; waits for rank 0 to serve it.

    Raises:
        LaunchError: It can't be served or reached, or is another program's; says why.
    """
    parts = urlsplit(assignment.init)
    if parts.scheme == "file":
        return open_file_store(Path(parts.path), assignment)
    host, port = str(parts.hostname), int(parts.port or 0)
    addresses = resolve_host(host, port, assignment.init)
    if assignment.rank == 0 and not assignment.agent_store:
        _check_here(host, addresses, assignment.init, "rank 0", "--init")
        mine = serve_store(host, port, assignment.init, timeout_s)
        mine.set(SERVED, "rank 0")
        return mine
    wait_for_listener(
        host, port, assignment.init, timeout_s, report, f"rank {assignment.rank}", "rank 0", command_for(assignment, 0)
    )
    store = connect(host, port, assignment.init, timeout_s, "rank 0")
    if not assignment.agent_store:
        _check_ours(store, port, assignment.init)
    return store


def _check_ours(store: Store, port: int, init: str) -> None:
    """See that rank 0 of a run of Lockstep serves a store, before anything is written to it.

    Raises:
        LaunchError: Another program does.
    """
    end = time.monotonic() + SERVED_S
    while peek(store, SERVED) is None:
        if time.monotonic() > end:
            raise LaunchError(
                f"the store at {init} does not belong to a run of Lockstep",
                given=port_holder(port),
                cause="torchrun or another program meets there",
                fix="choose another port, the same for all processes; or end that program",
            )
        time.sleep(0.01)


def open_for_nodes(nodes: RendezvousConfig, report: Callable[[str], None]) -> tuple[Store, bool]:
    """The store at which the launchers of several machines meet, and whether this one serves it.

    Where the machines were given ranks, node rank 0 serves it; else the first launcher on the endpoint's machine.

    Raises:
        LaunchError: It can't be served or reached; says why.
    """
    host, port = split_endpoint(nodes.endpoint)
    addresses = resolve_host(host, port, nodes.endpoint)
    if nodes.rank == 0:
        _check_here(host, addresses, nodes.endpoint, "node rank 0", "--master")
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


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def command_for(assignment: RankAssignment, rank: int) -> str:
    """What to type to start another rank, from what was typed for this one; empty if a launcher starts them."""
    if assignment.started_by != "command line":
        return ""
    return command_option("--rank", rank) or f"RANK={rank} {_typed(sys.argv[1:])}"


def command_option(option: str, value: int) -> str:
    """What was typed for this process, with another value of an option; empty if the option is not in it."""
    words = sys.argv[1:]
    for place, word in enumerate(words):
        if word == option and place + 1 < len(words):
            return _typed([*words[: place + 1], str(value), *words[place + 2 :]])
        if word.startswith(f"{option}="):
            return _typed([*words[:place], f"{option}={value}", *words[place + 1 :]])
    return ""


def _typed(words: Sequence[str]) -> str:
    name = Path(sys.argv[0]).name
    return " ".join(["lockstep" if name in ("lockstep", "__main__.py") else f"python {name}", *map(shlex.quote, words)])


def as_clock(seconds: float) -> str:
    """Minutes and seconds: 4:48."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def resolve_host(host: str, port: int, init: str) -> list[str]:
    """The IP addresses of a host's name; `init` is what was given.

    Raises:
        LaunchError: Nobody knows it.
    """
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
                    fix=f"give an IP address, or make the name known on {socket.gethostname()}",
                ) from None
            time.sleep(1.0)


def _check_here(host: str, addresses: list[str], init: str, who: str, option: str) -> None:
    if not any(is_local_address(address) for address in addresses):
        raise LaunchError(
            f"{who} must run on {host}, but this is {socket.gethostname()}",
            given=init,
            where=f"{host} is {', '.join(addresses)}, no address of this machine",
            fix=f"start {who} there, or name this machine in {option} on all of them",
        )


def serve_store(host: str, port: int, init: str, timeout_s: float, who: str = "rank 0") -> TCPStore:
    """A store that this process serves to the others.

    Raises:
        LaunchError: The port is taken, or can't be listened on.
    """
    try:
        listener = _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _in_use(port, init, who) from None
        raise LaunchError(f"{who} can't listen on port {port}: {error.strerror}", given=init) from None
    seconds = timedelta(seconds=timeout_s)
    address = str(listener.getsockname()[0])
    return TCPStore(address, port, None, True, seconds, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen(host: str, port: int) -> socket.socket:
    """Listen on the one address that the others are given."""
    address = store_address(host, port)
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _in_use(port: int, init: str, who: str) -> LaunchError:
    holder = port_holder(port)
    return LaunchError(
        f"port {port} is in use" + (f" by {holder}" if holder else ""),
        given=init,
        cause=f"another run meets there, or a second process was started with {who}",
        fix="choose another port (the same on all machines), or end that process",
    )


def wait_for_listener(
    host: str,
    port: int,
    init: str,
    timeout_s: float,
    report: Callable[[str], None],
    who: str,
    whom: str,
    command: str = "",
) -> None:
    """Wait until somebody listens at the address.

    Args:
        host: Of the listener.
        port: Of the listener.
        init: The address as it was given.
        timeout_s: How long to wait.
        say: Gets a text every few seconds.
        who: Who waits, for the texts.
        whom: For whom.
        command: What starts the one that is waited for.

    Raises:
        LaunchError: Nobody does.
    """
    start = time.monotonic()
    next_report_s = REPORT_EVERY_S
    pause_s = 0.01
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
                f"{who} waited {waited:.0f} s for {whom} at {init}: {reason}",
                cause=f"{whom} is not running there, or a firewall is between",
                fix=command or None,
                where="cluster.join_timeout_s",
            )
        if waited >= next_report_s:
            next_report_s += REPORT_EVERY_S
            report(
                f"{who} waits for {whom} at {init}: {reason}, {waited:.0f} s\n"
                + (f"  on its machine:  {command}\n" if command else "")
                + f"  giving up in {as_clock(timeout_s - waited)} (cluster.join_timeout_s)"
            )
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.5)


def connect(host: str, port: int, init: str, timeout_s: float, whom: str) -> Store:
    """Connect; in a thread, as torch waits for ever for the answer of a listener that is no store.

    Raises:
        LaunchError: It is none; `whom` says who it should have been.
    """
    made: list[Store | BaseException] = []
    address = store_address(host, port)

    def connect() -> None:
        try:
            made.append(TCPStore(address, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False))
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="store-client", daemon=True)
    thread.start()
    end = time.monotonic() + min(HANDSHAKE_S, timeout_s)
    while thread.is_alive() and time.monotonic() < end:
        thread.join(min(0.5, HANDSHAKE_S))
        if thread.is_alive() and not _is_listening(host, port):
            raise LaunchError(f"lost {whom} at {init} while connecting to it", cause="its own output says why")
    if made and isinstance(made[0], Store):
        return made[0]
    reason = str(made[0]).splitlines()[0] if made else f"no word from it in {min(HANDSHAKE_S, timeout_s):.0f} s"
    raise LaunchError(
        f"something listens at {init}, but it is not {whom}: {reason}",
        given=port_holder(port),
        fix="choose another port, the same on all machines",
    )


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)  # else it is busy, or the link is slow
    return True
