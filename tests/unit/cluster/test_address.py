"""Ports and interfaces of this machine."""

import errno
import os
import socket
import subprocess
import sys

import pytest

from samebits.cluster.address import ReservedPort, command_of, interface_towards, is_local_address, port_holder
from samebits.cluster.store import _listen
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
