"""Jobs of a rank pool for the doctor's tests: functions whose first argument is a world."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from samebits.cluster.world import World
from samebits.doctor import examine
from samebits.doctor import examine as between


def links(world: World, spoilt_rank: int | None = None) -> list[dict[str, Any]]:
    """Return the doctor's results on a world's links; one rank's network may damage what it receives."""
    real = dist.all_reduce

    def damaged(values: torch.Tensor) -> None:
        real(values)
        if world.rank == spoilt_rank:
            values[len(values) // 2] += 1

    with patch.object(dist, "all_reduce", damaged), patch.object(between, "SIZES", (1024, 64 * 1024)):
        return [finding.to_json() for finding in between.examine_links(world)]


def summary(world: World, other_rank: int) -> list[dict[str, Any]]:
    """Return the doctor's results on a world in which one rank has another torch."""
    mine = examine.summary(world, None, [])
    if world.rank == other_rank:
        mine["torch"] = "0.1"
    return [finding.to_json() for finding in examine.compare_ranks(world, mine)]
