"""Addresses and ports of processes, how often they call the store, and the backend that they take."""

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from samebits.cluster import address
from samebits.cluster.address import ReservedPort, command_of, interface_towards, is_local_address, port_holder
from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import RankInfo, Rendezvous, ranks_text
from samebits.cluster.signed import Seal, SignedStore
from samebits.cluster.store import _listen, wait_for_listener
from samebits.cluster.world import alone, choose_backend
from samebits.errors import LaunchError
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


def infos(hosts: str, device: str = "cuda", backend: str = "auto", num_gpus: int = 2) -> list[RankInfo]:
    return [RankInfo(rank, len(hosts), host, 100 + rank, device, backend, num_gpus) for rank, host in enumerate(hosts)]


def test_cpu_takes_gloo_and_cuda_takes_nccl() -> None:
    assert choose_backend(infos("aabb", device="cpu", num_gpus=0)) == ("gloo", "")
    assert choose_backend(infos("aabb")) == ("nccl", "")


def test_processes_that_share_a_gpu_take_gloo_and_say_so() -> None:
    backend, warning = choose_backend(infos("aaab"))
    assert backend == "gloo"
    assert "3 processes share 2 GPU(s) on a" in warning


def changed(ranks: list[RankInfo], **more: str) -> list[RankInfo]:
    return [ranks[0], replace(ranks[1], **more), *ranks[2:]]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (infos("aaab", backend="nccl"), "share 2 GPU"),
        (infos("ab", device="cpu", backend="nccl", num_gpus=0), "device is cpu"),
        (changed(infos("aab"), device="cpu"), "cuda on ranks 0 2, cpu on rank 1"),
        (changed(infos("ab", device="cpu"), backend="gloo"), "backend"),
    ],
    ids=["nccl on a shared GPU", "nccl without a GPU", "different devices", "different backends"],
)
def test_what_cannot_be_is_refused(ranks: list[RankInfo], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        choose_backend(ranks)


def test_ranks_are_listed_up_to_sixteen() -> None:
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([0, 1, 3]) == "ranks 0 1 3"
    assert ranks_text(range(20)).endswith("15 and 4 more")


def test_a_process_that_is_alone_has_no_group() -> None:
    import torch.distributed as dist

    world = alone("cpu")
    assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
    assert not dist.is_initialized()


def test_a_device_that_is_not_there_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(LaunchError, match="no CUDA device"):
        alone("cuda")


class CountedStore(HashStore):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        self.calls += 1
        return super().add(key, value)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.calls += 1
        return super().compare_set(key, expected_value, desired_value)

    def check(self, keys: Sequence[str]) -> bool:
        self.calls += 1
        return super().check([*keys])


def joining(rank: int, size: int, store: HashStore) -> Rendezvous:
    assignment = RankAssignment(rank, size, rank, size, "", "command line")
    info = RankInfo(rank, size, "here", 1 + rank, "cpu", "gloo", 0, network="here")
    return Rendezvous(
        assignment, info, SignedStore(store, Seal("key", "run")), time.monotonic(), 600.0, lambda _: None, None
    )


def calls_to_join(size: int) -> tuple[int, int]:
    store, calls = CountedStore(), [0] * size
    ranks = [joining(rank, size, store) for rank in range(size)]
    for work, numbers in (("register", range(size)), ("wait", dict.fromkeys((0, size - 1)))):
        for rank in numbers:
            before = store.calls
            getattr(ranks[rank], work)()
            calls[rank] += store.calls - before
    return calls[0], calls[-1]


@pytest.mark.parametrize("size", [1, 2, 16, 256])
def test_only_rank_0_makes_more_calls_of_the_store_in_a_larger_world(size: int) -> None:
    first, last = calls_to_join(size)
    assert first == size + 4  # an entry of each other rank, and five of its own
    assert last == (first if size == 1 else 4)
