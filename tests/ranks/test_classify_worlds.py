"""The classify recipe over real processes: one hash in all worlds, with any number of workers, and after stops.

If a change of the results of training is intended, `python -m tests.ranks.test_classify_worlds` records new values;
the commit message gives the reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make
from tests.ranks.classify_in_ranks import carry_out, settings
from tests.ranks.rank_pool import RankPool
from tests.ranks.recorded import check_recorded, record

RECORDED = Path(__file__).with_name("classify_recorded.json")

# On a machine that does much else too, forked workers and ranks wait long for their turns.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 synthetic images in class folders."""
    return _made(tmp_path_factory.mktemp("shapes"))


def _made(folder: Path) -> Path:
    make(MakeConfig(num_per_class=20, size_px=80), folder)
    return folder


@pytest.mark.parametrize(
    ("batch_norm", "worlds"),
    [
        ("micro", (2,)),
        pytest.param("micro", (4,), marks=pytest.mark.full),
        pytest.param("sync", (3,), marks=pytest.mark.full),
    ],
)
def test_classify_gives_one_hash_in_all_worlds_and_after_a_stop(
    pool: RankPool, shapes: Path, tmp_path: Path, batch_norm: str, worlds: tuple[int, ...]
) -> None:
    config = settings(shapes, batch_norm=batch_norm)
    ((weights, figures, losses, is_done),) = pool.run(1, carry_out, tmp_path / "1", config)
    assert is_done
    assert len(losses) == 20
    for world in worlds:
        for other in pool.run(world, carry_out, tmp_path / str(world), config):
            assert other == (weights, figures, losses, True)
    pool.run(2, carry_out, tmp_path / "stopped", config, 7)
    for other in pool.run(3, carry_out, tmp_path / "stopped", config):
        assert other[:2] == (weights, figures)
        assert other[2] == losses[8:]


@pytest.mark.full
def test_workers_change_no_bit(pool: RankPool, shapes: Path, tmp_path: Path) -> None:
    ((weights, *_),) = pool.run(1, carry_out, tmp_path / "none", settings(shapes))
    for other in pool.run(2, carry_out, tmp_path / "two", settings(shapes, num_workers=2)):
        assert other[0] == weights


@pytest.mark.full
def test_decoded_pictures_that_all_ranks_keep_change_no_bit(pool: RankPool, shapes: Path, tmp_path: Path) -> None:
    ((weights, *_),) = pool.run(1, carry_out, tmp_path / "plain", settings(shapes))
    config = settings(shapes, data={"cache": tmp_path / "decoded"}, num_workers=1)
    for number in range(2):  # the second run finds all of them
        for other in pool.run(3, carry_out, tmp_path / str(number), config):
            assert other[0] == weights
    kept = list((tmp_path / "decoded").glob("??/*"))
    assert len(kept) >= 100
    assert not [path for path in kept if "partial" in path.name]


@pytest.mark.full
def test_a_resnet_too_gives_one_hash(pool: RankPool, shapes: Path, tmp_path: Path) -> None:
    config = settings(shapes, model={"name": "resnet18"}).model_copy(update={"global_batch": 40, "micro_batch": 8})
    config = config.model_copy(update={"epochs": 1})
    ((weights, figures, *_),) = pool.run(1, carry_out, tmp_path / "1", config, -1, False)
    for other in pool.run(3, carry_out, tmp_path / "3", config, -1, False):
        assert other[:2] == (weights, figures)


def _twenty_steps(pool: RankPool, folder: Path) -> tuple[str, list[float]]:
    ((weights, _, losses, _),) = pool.run(1, carry_out, folder / "run", settings(_made(folder / "shapes")))
    return weights, losses


def test_twenty_steps_are_the_recorded_ones(pool: RankPool, tmp_path: Path) -> None:
    # With another JPEG library too the last digits differ.
    check_recorded(RECORDED, _twenty_steps, pool, tmp_path, tolerance=1e-2)


if __name__ == "__main__":
    record(RECORDED, _twenty_steps)
