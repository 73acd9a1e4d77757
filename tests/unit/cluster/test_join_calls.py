"""How many calls of the store a start takes: all ranks register in a store of this process before one looks."""

import time
from collections.abc import Sequence

import pytest
from torch.distributed import HashStore

from samebits.cluster.env import RankAssignment
from samebits.cluster.rendezvous import RankInfo, Rendezvous
from samebits.cluster.signed import Seal, SignedStore


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
