"""A plan's bytes are those that ranks really send."""

import pytest

from samebits.data.order import Order
from samebits.scaling.plan import bytes_sent, sizes_of
from tests.ranks.plan_in_ranks import Planned, bytes_of_a_step
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import settings


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("width", "mode"), [(40, "exact"), (4000, "exact"), (4000, "fast")])
def test_the_bytes_of_a_step_are_foreseen(pool: RankPool, world: int, width: int, mode: str) -> None:
    config = settings(mode=mode)
    order = Order(53, config.global_batch, config.micro_batch, 0)
    sent = pool.run(world, bytes_of_a_step, width, order, mode == "exact")
    # Buckets are filled up to whole lines of memory, and carry some figures.
    assert max(sent) == pytest.approx(bytes_sent(config, sizes_of(Planned(width)), world, "ddp"), rel=0.02)
