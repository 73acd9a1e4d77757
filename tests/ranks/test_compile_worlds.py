"""Compiled runs over real processes: the same weights in all worlds, and checkpoints that fit uncompiled runs."""

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file
from torch import nn

from samebits.cluster.world import World
from tests.ranks import rank_pool, runs_in_ranks
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import settings

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")


class Small(nn.Sequential):
    """What torch can put into one program: batch norm, dropout, and products whose order it may choose."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(3 * 64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 5)
        )


def carry_out_with(world: World, cache: Path, num_samples: int, *arguments: Any) -> Any:
    """A run on the small network; compiled code goes into a folder."""
    with (
        patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(cache)}),
        patch.multiple(runs_in_ranks, WithBatchNorm=Small, NUM_SAMPLES=num_samples),
    ):
        return runs_in_ranks.carry_out(world, *arguments)


@pytest.fixture(autouse=True)
def _time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "LIMIT_S", 200.0)  # the first program takes the compiler long, whatever its size


@pytest.mark.full
def test_a_compiled_run_gives_one_hash_and_the_names_of_an_uncompiled_one(pool: RankPool, tmp_path: Path) -> None:
    cache, config, num = tmp_path / "cache", settings(compile=True, micro_batch=4), 48  # one shape
    (alone,) = pool.run(1, carry_out_with, cache, num, tmp_path / "alone", config)
    assert alone[2]
    assert pool.run(2, carry_out_with, cache, num, tmp_path / "two", config) == [alone] * 2
    (plain,) = pool.run(1, carry_out_with, cache, num, tmp_path / "plain", settings(micro_batch=4))
    assert plain[0] != alone[0]  # it was compiled
    names = [load_file(tmp_path / run / "checkpoints" / "step-000006" / "weights.safetensors").keys()
             for run in ("alone", "plain")]  # fmt: skip
    assert names[0] == names[1]


@pytest.mark.lab
def test_one_hash_with_smaller_micro_batches_after_stops_and_across(pool: RankPool, tmp_path: Path) -> None:
    cache, config, num = tmp_path / "cache", settings(compile=True, every="2 steps", keep=9), 53
    (straight,) = pool.run(1, carry_out_with, cache, num, tmp_path / "straight", config)
    for world in (2, 4):
        assert pool.run(world, carry_out_with, cache, num, tmp_path / f"run-{world}", config) == [straight] * world
    pool.run(3, carry_out_with, cache, num, tmp_path / "stopped", config, "auto", 4)
    assert pool.run(2, carry_out_with, cache, num, tmp_path / "stopped", config) == [straight] * 2
    # An uncompiled run resumes from a compiled one's checkpoint, and ends close to it.
    checkpoint = str(tmp_path / "straight" / "checkpoints" / "step-000004")
    crossed = pool.run(2, carry_out_with, cache, num, tmp_path / "crossed", settings(), checkpoint)
    assert crossed[0][1]["metrics"]["loss"] == pytest.approx(straight[1]["metrics"]["loss"], rel=0.2)
