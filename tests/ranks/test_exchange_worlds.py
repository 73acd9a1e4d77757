"""How messages are handed to the network, and when."""

import time
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.parallel import reduce
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.exchange.part import Message
from samebits.parallel.reduce import Reducer
from tests.ranks import jobs
from tests.ranks.rank_pool import RankPool


def handed_over(world: World, limits: dict[str, int]) -> list[list[str]]:
    """For each round of a step, which messages are sends and which receives, in order."""
    rounds = []
    real = tree_all_reduce.post

    def note(world: World, messages: list[Message], *group: dist.ProcessGroup | None) -> list[dist.Work]:
        rounds.append(["receive" if message.is_receive else "send" for message in messages])
        return real(world, messages, *group)

    with patch.object(tree_all_reduce, "post", note):
        jobs.train(world, "plain", Order(24, 12, 2, seed=1), 1, limits)
    return rounds


@pytest.mark.parametrize("limits", [{}, {"SMALL_BYTES": 0}])
def test_receives_go_first_so_that_a_slow_link_carries_both_directions(pool: RankPool, limits: dict[str, int]) -> None:
    for rounds in pool.run(3, handed_over, limits):
        assert rounds
        for messages in rounds:
            assert messages == sorted(messages)  # "receive" < "send"
            assert {"receive", "send"} == set(messages)


def summed_before_reduce(world: World, machines: tuple[int, ...]) -> bool:
    """Whether the first of several buckets is summed over all ranks before `reduce`, without a call of this thread."""
    with patch.object(reduce, "BUCKET_BYTES", 600):
        model, (inputs, labels) = jobs.make("plain"), jobs.samples(24)
        reducer = Reducer(model, replace(world, machines=machines))
        (step,) = Order(24, 24, 4, seed=2).steps(world, stop=1)
        reducer.begin(step)
        for micro in step.micro_batches:
            with reducer.micro_batch(micro):
                reducer.backward(jobs.mean_loss(model, inputs[micro.indices], labels[micro.indices]))
        end = time.monotonic() + (20.0 if machines else 0.3)
        while (bucket := reducer._sum.buckets[0]).result is None and time.monotonic() < end:
            time.sleep(0.01)
        found = bucket.result is not None
        reducer.reduce()
    return found


@pytest.mark.parametrize(("machines", "is_early"), [((0, 1), True), ((), False)])
def test_between_machines_a_bucket_is_summed_before_reduce(
    pool: RankPool, machines: tuple[int, ...], is_early: bool
) -> None:
    assert pool.run(2, summed_before_reduce, machines) == [is_early] * 2
