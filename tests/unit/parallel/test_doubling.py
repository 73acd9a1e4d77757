"""Sums inside a pass on virtual ranks: the bits of one process, in few messages, and errors that all ranks raise."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.cluster.world import alone
from samebits.data.division import part
from samebits.data.order import MicroBatch
from samebits.errors import TrainError
from samebits.parallel.coroutines import Coroutines
from samebits.parallel.exchange.part import DIRECT_SIZE, plan_rounds
from samebits.parallel.layer_sums import LayerSums
from samebits.parallel.tree import merged, push
from tests.unit.parallel.intervals import partials
from tests.unit.parallel.virtual_network import Network, SimulatedWorld

CPU = torch.device("cpu")
NUM_SUMS = 3


def contribution(leaf: int, number: int) -> Tensor:
    """Values whose sum depends on the order of the additions; another number of them for each sum."""
    generator = torch.Generator().manual_seed(leaf)
    return torch.randn(3 + number, generator=generator, dtype=torch.float64) * 10.0 ** (leaf % 7)


def total(num: int, number: int) -> Tensor:
    stack: list[tuple[tuple[int, int], Tensor]] = []
    for leaf in range(num):
        push(stack, (leaf, leaf + 1), contribution(leaf, number), num, torch.add)
    return stack[0][1]


class Found(NamedTuple):
    sums: list[list[list[Tensor]]]  # of each rank, micro-batch and sum
    errors: list[str]
    network: Network


def add_up(size: int, num: int, *, leaves_early: int | None = None) -> Found:
    """What each micro-batch of each rank receives; one of them may leave before the second sum."""
    outer, base = Coroutines(lambda: lambda: None), alone("cpu")
    network = Network(size, lambda: outer.wait(True))
    shares = [part(0, num, size, rank) for rank in range(size)]
    nodes = [partials(*share, num) for share in shares]
    errors: list[str] = []

    def run(rank: int) -> list[list[Tensor]]:
        world = SimulatedWorld(rank, size, 0, CPU, "gloo", base.host, None, base.assignment, network=network)
        sums = LayerSums(world, CPU, ["first", "second", "third"], 8, Coroutines(lambda: lambda: None))

        def body(micro: MicroBatch) -> list[Tensor]:
            stop = 1 if micro.index == leaves_early else NUM_SUMS
            return [sums.sum(number, contribution(micro.index, number), Tensor.clone) for number in range(stop)]

        micro_batches = [MicroBatch(0, 0, leaf, np.arange(1), np.arange(1), 1.0, leaf) for leaf in range(*shares[rank])]
        try:
            return sums.run(micro_batches, nodes, body)
        except TrainError as error:
            errors.append(error.slots["where"])
            return []

    found = outer.run([partial(run, rank) for rank in range(size)], lambda _: network.deliver())
    return Found(found, errors, network)


@settings(max_examples=12, deadline=None)
@given(size=st.integers(2, 50), num=st.integers(1, 60))
def test_every_micro_batch_receives_the_sum_of_one_process(size: int, num: int) -> None:
    found = add_up(size, num)
    totals = [total(num, number) for number in range(NUM_SUMS)]
    each = [sums for rank in found.sums for sums in rank]
    assert len(each) == num
    assert all(torch.equal(one, right) for sums in each for one, right in zip(sums, totals, strict=True))


@pytest.mark.parametrize(("size", "most"), [(4, 3), (16, 15), (17, 5), (64, 6), (100, 7)])
def test_a_rank_sends_a_message_to_each_other_one_or_in_large_worlds_to_a_partner_a_round(size: int, most: int) -> None:
    network = add_up(size, size).network
    # Three sums, and the end of the pass.
    assert max(each.messages for each in network.traffic) == (NUM_SUMS + 1) * most
    if size <= DIRECT_SIZE:
        assert network.rounds == NUM_SUMS + 1


@pytest.mark.parametrize(("size", "num"), [(32, 32), (20, 50)])
@pytest.mark.parametrize("where", [0, -1])
def test_all_ranks_report_a_micro_batch_at_another_layer(size: int, num: int, where: int) -> None:
    found = add_up(size, num, leaves_early=where % num)
    assert len(found.errors) == size
    assert any("its end" in text for text in found.errors)
    assert all("second" in text or "its end" in text for text in found.errors)
    assert any("is at several layers at once" in text for text in found.errors)


def test_ranks_without_a_micro_batch_take_no_part() -> None:
    nodes = [[(0, 1)], [], [(1, 2)]]
    assert [each.sends_to for each in plan_rounds(2, nodes, 2, 8)] == [(0,)]
    assert plan_rounds(0, [[(0, 2)], []], 2, 8) == []
    many = [[(leaf, leaf + 1)] for leaf in range(20)] + [[]] * 5
    assert {peer for rank in range(20) for each in plan_rounds(rank, many, 20, 8) for peer in each.sends_to} == set(
        range(20)
    )


def test_after_a_loss_within_a_step_ranks_exchange_with_all_others() -> None:
    nodes = [[(leaf, leaf + 1)] for leaf in reversed(range(20))]
    (only,) = plan_rounds(0, nodes, 20, 8)
    assert len(only.sends_to) == 19


@given(num=st.integers(1, 60), cuts=st.sets(st.integers(1, 59)))
def test_merged_nodes_are_those_of_the_interval(num: int, cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < num), num]
    nodes = [node for first, last in pairwise(edges) for node in partials(first, last, num)]
    assert merged(nodes, num) == [(0, num)]
