"""A rank that hangs fails its test with the place where it hangs."""

import os
import time

import pytest

from samebits.cluster.stacks import StackDumper
from samebits.cluster.world import World
from tests.ranks import rank_pool
from tests.ranks.rank_pool import RankPool


def _hang(world: World) -> None:
    if world.rank == 0:
        if os.fork() == 0:
            _hang_in_loader_worker()
        _hang_in_rank()


def _hang_in_rank() -> None:
    time.sleep(1000)


def _hang_in_loader_worker() -> None:
    rank = os.getppid()
    while os.getppid() == rank:
        time.sleep(0.05)
    os._exit(0)


def _rank(world: World) -> int:
    StackDumper().close()  # as a HangDetector does
    return world.rank


def test_a_rank_that_hangs_is_named_and_the_next_world_is_new(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(2, _rank) == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(rank_pool, "LIMIT_S", 5.0)
        with pytest.raises(AssertionError, match="rank 0 of 2 gave no answer") as caught:
            pool.run(2, _hang)
    assert "in _hang_in_rank" in str(caught.value)
    assert "in _hang_in_loader_worker" in str(caught.value)
    assert "rank 1" not in str(caught.value)
    assert pool.run(2, _rank) == [0, 1]
