"""The store listens on a single address."""

import errno
import socket

import pytest

from samebits.cluster import address
from samebits.cluster.store import _listen, wait_for_listener
from tests.runs import own_port


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
    "a": (["192.0.2.7"], "192.0.2.7"),
    "b": (["127.0.1.1"], "10.1.2.3"),
    "c": (["127.0.1.1", "192.0.2.7"], "192.0.2.7"),
    "b.example": (["127.0.1.1"], "10.1.2.3"),
    "alias": (["127.0.0.1"], "127.0.0.1"),
    "far": (["198.51.100.9"], "far"),
    "nowhere": ([], "nowhere"),
}


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
