"""What torch does not promise and in-step recovery needs. A failure here means that torch has changed."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from samebits.cluster.views import torch_traps
from samebits.cluster.views.membership import Membership, View, ViewEnded, write_view
from samebits.cluster.views.torch_traps import wait_for_peers

# Waits that nothing else ends take this long; longer than all others together, on a machine that is busy.
TIMEOUT_S = 8.0
pytestmark = pytest.mark.skipif(not torch_traps.can_end_groups(), reason="no /proc/self/fd")


@pytest.fixture
def groups() -> dict[int, dist.ProcessGroupGloo]:
    """Two ranks of one group, both in this process."""
    before, store = torch_traps.open_sockets(), HashStore()
    made: dict[int, dist.ProcessGroupGloo] = {}

    def connect(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=TIMEOUT_S))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch_traps.add_sockets(before)
    return made


def test_a_wait_of_gloo_ends_with_its_sockets_and_not_with_abort(groups: dict[int, dist.ProcessGroupGloo]) -> None:
    errors: list[str] = []

    def receive() -> None:
        try:
            groups[0].recv([torch.zeros(1)], 1, 0).wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    groups[0].abort()
    thread.join(0.5)
    assert thread.is_alive(), "torch's abort ends a wait now: it may replace the search for sockets"
    torch_traps.end_group()
    thread.join(30)
    torch_traps.forget_group()
    assert errors


@pytest.fixture
def membership(tmp_path: Path) -> Iterator[Membership]:
    write_view(tmp_path / "views.json", View(0, 0, (0, 1)))
    made = Membership(tmp_path / "views.json", 0)
    yield made
    made.close()


@pytest.mark.full  # gloo leaves its waits after TIMEOUT_S
def test_a_wait_for_the_rest_of_a_message_ends_with_its_group_but_not_in_gloo(
    groups: dict[int, dist.ProcessGroupGloo], membership: Membership
) -> None:
    for descriptor, _ in torch_traps.present_group().sockets:
        with socket.socket(fileno=os.dup(descriptor)) as connection:  # the message takes longer
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    left, errors = threading.Event(), list[BaseException]()
    values = torch.zeros(100_000_000)
    receives = groups[0].recv([values], 1, 0)
    sends = groups[1].send([torch.ones(len(values))], 0, 0)
    while values[0] == 0:  # until it is under way
        pass

    def send() -> None:
        try:
            wait_for_peers(membership, sends.wait)
        except ViewEnded as error:
            errors.append(error)

    def receive() -> None:
        try:
            receives.wait()
        finally:
            left.set()

    thread = threading.Thread(target=send)
    thread.start()
    torch_traps.end_group()  # as after the loss of a rank
    began = time.monotonic()
    with pytest.raises(ViewEnded, match="the rest of a message"):
        wait_for_peers(membership, receive)
    torch_traps.forget_group()  # the next group is formed, and a wait in this one ends all the same
    thread.join(TIMEOUT_S / 2)
    assert time.monotonic() - began < TIMEOUT_S / 2, "it took as long as the group's timeout"
    assert errors
    assert not left.is_set(), "gloo ends this wait now: `waits.py` may go"


def test_an_error_and_an_answer_reach_the_thread_that_waits(membership: Membership) -> None:
    assert wait_for_peers(membership, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        wait_for_peers(membership, lambda: 1 / 0)


def test_the_count_of_groups_is_part_of_the_keys_of_a_group() -> None:
    keys = []
    for count in (0, 7):
        store = HashStore()
        dist.distributed_c10d._world.group_count = count
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()
        keys.append(sorted(store.list_keys()))
    torch_traps.count_groups_from_0()
    assert keys[0] != keys[1], "the count of groups is in no key now: it need not be reset"


def test_the_last_reference_to_a_group_is_dropped_by_the_waiting_thread() -> None:
    dropped: list[str] = []

    class Group:
        def __del__(self) -> None:
            dropped.append(threading.current_thread().name)

    mine = Group()
    thread = threading.Thread(target=torch_traps.drop_last, args=([mine, Group()],), name="waiting")
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert dropped == ["waiting"]
    del mine
    thread.join(30)
    assert dropped == ["waiting", "waiting"]
