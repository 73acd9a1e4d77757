"""Exchanges that threads advance: all to their end, in any order; an error is raised; none keeps a process group."""

import threading
import weakref

import pytest
import torch
from torch import nn

from samebits.cluster.world import World, alone
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.in_threads import ExchangeThreads
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce


class Counted:
    def __init__(self, rounds: int, error: Exception | None = None) -> None:
        self.rounds, self.error = rounds, error

    def advance(self) -> bool:
        self.rounds -= 1
        if self.rounds == 0 and self.error is not None:
            raise self.error
        return self.rounds == 0


class Waiting:
    """An exchange that ends when another one has."""

    def __init__(self, after: threading.Event, ended: threading.Event) -> None:
        self.after, self.ended = after, ended

    def advance(self) -> bool:
        assert self.after.wait(60)
        self.ended.set()
        return True


def test_all_exchanges_are_complete_after_finish() -> None:
    exchanges = [Counted(rounds) for rounds in (2, 5, 1)]
    threads = ExchangeThreads()
    for each in exchanges:
        threads.put(each.advance)
    threads.finish()
    assert [each.rounds for each in exchanges] == [0, 0, 0]


def test_no_exchange_waits_for_the_one_before() -> None:
    begun, first, second = threading.Event(), threading.Event(), threading.Event()
    threads = ExchangeThreads()
    threads.put(Waiting(second, first).advance)
    threads.put(Waiting(begun, second).advance)
    begun.set()
    threads.finish()
    assert first.is_set()


def test_the_loss_of_a_rank_is_raised_while_another_exchange_waits() -> None:
    end_of_group = threading.Event()
    threads = ExchangeThreads()
    threads.put(Waiting(end_of_group, threading.Event()).advance)
    threads.put(Counted(2, RuntimeError("closed by peer")).advance)
    with pytest.raises(RuntimeError, match="closed by peer"):
        threads.finish()
    end_of_group.set()
    threads.join()


def test_threads_add_tiny_numbers_like_the_main_thread() -> None:
    tiny, found = torch.tensor(1e-40), []

    class Adds:
        def advance(self) -> bool:
            found.append((tiny + 0.0).item())
            return True

    torch.set_flush_denormal(True)
    try:
        threads = ExchangeThreads()
        threads.put(Adds().advance)
        threads.finish()
    finally:
        torch.set_flush_denormal(False)
    assert found == [0.0]


class Group:
    """Stands for a process group."""


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    made = [Group()]
    monkeypatch.setattr(World, "gloo_group", property(lambda _: made[0] if made else None))
    return made


def test_a_complete_exchange_keeps_no_group(groups: list[Group]) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    bucket = Bucket([parameter], 0, 1, torch.device("cpu"))
    bucket.start_step([0])
    leaf = bucket.start_leaf(0, 1)
    bucket.take(leaf, 0, 1.0)
    bucket.end_leaf(leaf, 1)
    exchange = TreeAllReduce(bucket, alone("cpu"), [[(0, 1)]], 0)
    kept = weakref.ref(groups.pop())
    exchange.start()
    assert kept() is not None
    while not exchange.advance():
        pass
    assert kept() is None
