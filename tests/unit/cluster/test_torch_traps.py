"""What torch does not promise and in-step recovery needs. A failure here means that torch has changed."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from samebits.cluster.views import torch_traps

pytestmark = pytest.mark.skipif(not torch_traps.can_end_groups(), reason="no /proc/self/fd")


@pytest.fixture
def groups() -> dict[int, dist.ProcessGroupGloo]:
    """Two ranks of one group, both in this process."""
    before, store = torch_traps.open_sockets(), HashStore()
    made: dict[int, dist.ProcessGroupGloo] = {}

    def connect(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

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
