"""How messages are handed to the network."""

from unittest.mock import patch

import pytest
import torch.distributed as dist

from samebits.cluster.world import World
from samebits.data.order import Order
from samebits.parallel.exchange import tree_all_reduce
from samebits.parallel.exchange.part import Message
from tests.ranks import jobs
from tests.ranks.rank_pool import RankPool


def handed_over(world: World, limits: dict[str, int]) -> list[list[str]]:
    """For each round of a step, which messages are sends and which receives, in order."""
    rounds = []
    real = tree_all_reduce.post

    def note(world: World, messages: list[Message]) -> list[dist.Work]:
        rounds.append(["receive" if message.is_receive else "send" for message in messages])
        return real(world, messages)

    with patch.object(tree_all_reduce, "post", note):
        jobs.train(world, "plain", Order(24, 12, 2, seed=1), 1, True, limits)
    return rounds


@pytest.mark.parametrize("limits", [{}, {"SMALL_BYTES": 0}])
def test_receives_go_first_so_that_a_slow_link_carries_both_directions(pool: RankPool, limits: dict[str, int]) -> None:
    for rounds in pool.run(3, handed_over, limits):
        assert rounds
        for messages in rounds:
            assert messages == sorted(messages)  # "receive" < "send"
            assert {"receive", "send"} == set(messages)
