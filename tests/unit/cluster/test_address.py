"""Ports and interfaces of this machine, and the single address at which the store listens."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from samebits.cluster import address
from samebits.cluster.address import ReservedPort, command_of, interface_towards, is_local_address, port_holder
from samebits.cluster.store import _listen, wait_for_listener
from tests.runs import own_port

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_reserved_port_can_be_listened_on_by_its_number() -> None:
    kept = ReservedPort()
    for host in ("127.0.0.1", ""):
        with _listen("127.0.0.1", kept.renew(host)) as listener:
            socket.create_connection(listener.getsockname(), timeout=60).close()
    kept.close()


@linux
def test_a_reserved_port_is_not_assigned_again_and_refuses_connections() -> None:
    kept = ReservedPort()
    port = kept.renew()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    # What asks for any port gets none that it could not ask for like this.
    with socket.socket() as other, pytest.raises(OSError) as caught:
        other.bind(("127.0.0.1", port))
    assert caught.value.errno == errno.EADDRINUSE
    kept.close()


@linux
def test_the_process_that_holds_a_port_is_found() -> None:
    port = own_port()
    with _listen("127.0.0.1", port):
        assert port_holder(port).startswith(f"pid {os.getpid()} (")
    assert port_holder(port) == ""


@linux
def test_a_command_is_shortened() -> None:
    assert 0 < len(command_of(os.getpid())) <= 80
    assert command_of(2**22 + 1) == ""


def test_only_this_machines_addresses_are_ours() -> None:
    assert is_local_address("127.0.0.1")
    # Reserved for documentation, so no machine has it.
    assert not is_local_address("192.0.2.1")


@linux
def test_loopback_is_reached_by_its_own_interface() -> None:
    assert interface_towards("tcp://127.0.0.1:29500") == "lo"
    assert interface_towards("file:///tmp/meet") == ""
    assert interface_towards("tcp://no-such-host.invalid:1") == ""


@linux
def test_a_command_of_many_lines_is_shown_in_one() -> None:
    program = ["sh", "-c", "echo started\n\nread line"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert command_of(process.pid) == "sh -c echo started read line"
        process.stdin.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_is_listened_on_alone(host: str) -> None:
    port = own_port()
    with _listen(host, port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60)


def test_a_name_is_listened_on_at_one_address_where_the_others_reach_it() -> None:
    port = own_port()
    name = socket.gethostname()
    with _listen(name, port) as listener:
        assert listener.getsockname()[0] not in ("0.0.0.0", "::")
        wait_for_listener(name, port, f"tcp://{name}:{port}", 60, print, "rank 1", "rank 0")
        others = {"127.0.0.1", "127.0.0.2"} - {listener.getsockname()[0]}
        for other in others:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=60)


# What a name means to its own machine, and where its store listens then; 10.1.2.3 is this machine's way out.
NAMES = {
    "a": (["192.0.2.7"], "192.0.2.7"), "b": (["127.0.1.1"], "10.1.2.3"), "c": (["127.0.1.1", "192.0.2.7"], "192.0.2.7"),
    "b.example": (["127.0.1.1"], "10.1.2.3"), "alias": (["127.0.0.1"], "127.0.0.1"), "far": (["198.51.100.9"], "far"),
    "nowhere": ([], "nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_an_address_that_other_machines_reach(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wanted = NAMES[name]

    def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        if not found:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 1)) for each in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: "b.example" if name == "b.example" else "b")
    monkeypatch.setattr(address, "is_local_address", lambda given: given.startswith(("127.", "192.0.2.")))
    monkeypatch.setattr(address, "address_towards", lambda host, port: "10.1.2.3")
    assert address.store_address(name, 1) == wanted


def test_a_port_in_use_is_an_error() -> None:
    port = own_port()
    with _listen("127.0.0.1", port), pytest.raises(OSError) as caught:
        _listen("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE
