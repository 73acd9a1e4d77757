"""The meeting place listens on no more than it takes."""

from __future__ import annotations

import errno
import socket

import pytest

from lockstep.cluster.meeting import _listen
from tests.runs import own_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_is_listened_on_alone(host: str) -> None:
    port = own_port()
    with _listen(host, port) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=60)


def test_a_name_is_listened_on_everywhere_since_it_may_be_another_address_to_others() -> None:
    port = own_port()
    with _listen(socket.gethostname(), port):
        for address in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((address, port), timeout=60).close()


def test_a_port_in_use_is_an_error() -> None:
    port = own_port()
    with _listen("127.0.0.1", port), pytest.raises(OSError) as caught:
        _listen("127.0.0.1", port)
    assert caught.value.errno == errno.EADDRINUSE
