"""The text recipe over real processes: one hash in all worlds and after stops, and 20 recorded steps.

If a change of the results of training is intended, `python -m tests.ranks.test_text_worlds` records new values; the
commit then says why.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import DataError
from samebits.recipes.text.config import LATIN
from samebits.recipes.text.fonts import find_fonts
from tests.ranks.rank_pool import RankPool
from tests.ranks.recorded import check_recorded, record
from tests.ranks.text_in_ranks import carry_out, draw_digits, settings

RECORDED = Path(__file__).with_name("text_recorded.json")


@pytest.mark.parametrize(
    ("name", "num_workers", "worlds"),
    [
        ("crnn", 1, (3,)),
        pytest.param("crnn", 1, (2, 4), marks=pytest.mark.full),
        pytest.param("fast", 0, (2, 3, 4), marks=pytest.mark.full),
    ],
)
def test_groups_of_widths_give_one_hash_in_all_worlds_and_after_a_stop(
    pool: RankPool, tmp_path: Path, name: str, num_workers: int, worlds: tuple[int, ...]
) -> None:
    draw_digits(tmp_path, 50)
    config = settings(tmp_path, name=name)
    (straight,) = pool.run(1, carry_out, tmp_path / "1", config)
    weights, figures, losses, is_done = straight
    assert is_done
    assert len(losses) == 8
    assert set(figures) == {"loss", "line_accuracy", "cer"}
    busy = settings(tmp_path, name=name, num_workers=num_workers)
    for world in worlds:
        assert pool.run(world, carry_out, tmp_path / str(world), busy) == [straight] * world
    pool.run(2, carry_out, tmp_path / "stopped", config, 4)
    for other in pool.run(3, carry_out, tmp_path / "stopped", config):
        assert other == (weights, figures, losses[5:], True)


@pytest.mark.full
def test_synthetic_lines_give_one_hash_in_two_worlds(pool: RankPool, tmp_path: Path) -> None:
    try:
        find_fonts(None, LATIN)
    except DataError as error:
        pytest.skip(error.what)
    made = {"num_train": 20, "num_eval": 8, "min_length": 2, "max_length": 4}
    config = settings(tmp_path, data={"train": None, "val_fraction": None, "width": 64, "made": made})
    (straight,) = pool.run(1, carry_out, tmp_path / "1", config)
    assert pool.run(2, carry_out, tmp_path / "2", config) == [straight] * 2


def _twenty_steps(pool: RankPool, folder: Path) -> tuple[str, list[float]]:
    draw_digits(folder, 50)
    ((weights, _, losses, _),) = pool.run(1, carry_out, folder / "run", settings(folder, epochs=5))
    return weights, losses


@pytest.mark.full
def test_twenty_steps_are_the_recorded_ones(pool: RankPool, tmp_path: Path) -> None:
    check_recorded(RECORDED, _twenty_steps, pool, tmp_path)


if __name__ == "__main__":
    record(RECORDED, _twenty_steps)
