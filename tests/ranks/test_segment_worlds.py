"""The segment recipe over real processes: one hash in all worlds, with any number of workers, and after stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.recipes.segment.config import MakeConfig
from samebits.recipes.segment.make import make
from tests.ranks.rank_pool import RankPool
from tests.ranks.segment_in_ranks import carry_out, settings

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("form", "worlds"),
    [("masks", ((3, 1),)), pytest.param("coco", ((2, 0), (3, 1)), marks=pytest.mark.full)],
)
def test_segment_gives_one_hash_in_all_worlds_with_workers_and_after_a_stop(
    pool: RankPool, tmp_path: Path, form: str, worlds: tuple[tuple[int, int], ...]
) -> None:
    make(MakeConfig(num_images=27, size_px=40), tmp_path / "made")
    root = tmp_path / "made" if form == "masks" else tmp_path / "made" / "coco.json"
    ((weights, metrics, losses, is_done),) = pool.run(1, carry_out, tmp_path / "1", settings(root))
    assert is_done
    assert len(losses) == 8
    assert 0 < metrics["mIoU"] < 1
    for world, num_workers in worlds:
        for other in pool.run(world, carry_out, tmp_path / str(world), settings(root, num_workers)):
            assert other == (weights, metrics, losses, True)
    pool.run(3, carry_out, tmp_path / "stopped", settings(root), 5)
    for other in pool.run(2, carry_out, tmp_path / "stopped", settings(root)):
        assert other[:2] == (weights, metrics)
        assert other[2] == losses[6:]
