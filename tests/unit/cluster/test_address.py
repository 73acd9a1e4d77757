"""What this machine knows of its own ports and interfaces."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from lockstep.cluster.address import command_of, free_port, interface_towards, is_ours, port_holder

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_a_free_port_can_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass


@linux
def test_who_holds_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port_holder(port).startswith(f"pid {os.getpid()} (")
    assert port_holder(port) == ""


@linux
def test_a_command_is_shortened() -> None:
    assert 0 < len(command_of(os.getpid())) <= 80
    assert command_of(2**22 + 1) == ""


def test_only_this_machines_addresses_are_ours() -> None:
    assert is_ours("127.0.0.1")
    # Set apart for documents, so nobody has it.
    assert not is_ours("192.0.2.1")


@linux
def test_loopback_is_reached_by_its_own_interface() -> None:
    assert interface_towards("tcp://127.0.0.1:29500") == "lo"
    assert interface_towards("file:///tmp/meet") == ""
    assert interface_towards("tcp://no-such-host.invalid:1") == ""
