"""A complete exchange keeps no process group: its threads would live as long as the step's sums."""

import weakref

import pytest
import torch
from torch import nn

from samebits.cluster.world import World, alone
from samebits.parallel.bucket import Bucket
from samebits.parallel.exchange.tree_all_reduce import TreeAllReduce


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
