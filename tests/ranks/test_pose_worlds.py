"""The pose recipe over real processes: one hash in all worlds and after stops, and 20 recorded steps.

If a change of the results of training is intended, `python -m tests.ranks.test_pose_worlds` records new values; the
commit then says why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.pose_in_ranks import carry_out, settings
from tests.ranks.rank_pool import RankPool
from tests.ranks.recorded import check_recorded, record

RECORDED = Path(__file__).with_name("pose_recorded.json")


@pytest.mark.parametrize(
    ("batch_norm", "epochs"),
    [("sync", 1), pytest.param("micro", 2, marks=pytest.mark.full)],
)
def test_pose_gives_one_hash_in_all_worlds_and_after_a_stop(
    pool: RankPool, tmp_path: Path, batch_norm: str, epochs: int
) -> None:
    config = settings(batch_norm=batch_norm).model_copy(update={"epochs": epochs})
    ((weights, figures, losses, is_done),) = pool.run(1, carry_out, tmp_path / "1", config)
    assert is_done
    assert len(losses) == 5 * epochs
    for world in (2, 3) if epochs > 1 else (3,):
        for other in pool.run(world, carry_out, tmp_path / str(world), config):
            assert other == (weights, figures, losses, True)
    pool.run(2, carry_out, tmp_path / "stopped", config, 2 * epochs)
    for other in pool.run(3, carry_out, tmp_path / "stopped", config):
        assert other[:2] == (weights, figures)
        assert other[2] == losses[2 * epochs + 1 :]


def _twenty_steps(pool: RankPool, folder: Path) -> tuple[str, list[float]]:
    config = settings().model_copy(update={"epochs": 4})
    ((weights, _, losses, _),) = pool.run(1, carry_out, folder / "run", config)
    return weights, losses


def test_twenty_steps_are_the_recorded_ones(pool: RankPool, tmp_path: Path) -> None:
    # Batch norm over two samples of one pixel each: from the fifth step on, rounding decides single ReLUs.
    check_recorded(RECORDED, _twenty_steps, pool, tmp_path, num_close=4, tolerance=5e-4)


if __name__ == "__main__":
    record(RECORDED, _twenty_steps)
