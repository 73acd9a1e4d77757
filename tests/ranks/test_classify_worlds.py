"""The classify recipe over real processes: one hash in all worlds, with any number of workers, and after stops.

Where a change of what training computes is meant, `python -m tests.ranks.test_classify_worlds` records anew; the
commit then says why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.environment import cpu_name
from lockstep.recipes.classify.config import MakeConfig
from lockstep.recipes.classify.make import make
from tests.ranks.classify_in_ranks import carry_out, settings
from tests.ranks.gang import Gang

RECORDED = Path(__file__).with_name("classify_recorded.json")

# On a machine that does much else too, forked workers and ranks wait long for their turns.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 made-up pictures in class folders."""
    return _made(tmp_path_factory.mktemp("shapes"))


def _made(folder: Path) -> Path:
    make(MakeConfig(num_per_class=20, size_px=80), folder)
    return folder


@pytest.mark.parametrize(("batch_norm", "worlds"), [("micro", (2, 4)), ("sync", (3,))])
def test_classify_gives_one_hash_in_all_worlds_and_after_a_stop(
    gang: Gang, shapes: Path, tmp_path: Path, batch_norm: str, worlds: tuple[int, ...]
) -> None:
    config = settings(shapes, batch_norm=batch_norm)
    ((weights, figures, losses, is_done),) = gang.run(1, carry_out, tmp_path / "1", config)
    assert is_done
    assert len(losses) == 20
    for world in worlds:
        for other in gang.run(world, carry_out, tmp_path / str(world), config):
            assert other == (weights, figures, losses, True)
    gang.run(2, carry_out, tmp_path / "stopped", config, 7)
    for other in gang.run(3, carry_out, tmp_path / "stopped", config):
        assert other[:2] == (weights, figures)
        assert other[2] == losses[8:]


def test_workers_change_no_bit(gang: Gang, shapes: Path, tmp_path: Path) -> None:
    ((weights, *_),) = gang.run(1, carry_out, tmp_path / "none", settings(shapes))
    for other in gang.run(2, carry_out, tmp_path / "two", settings(shapes, num_workers=2)):
        assert other[0] == weights


def test_decoded_pictures_that_all_ranks_keep_change_no_bit(gang: Gang, shapes: Path, tmp_path: Path) -> None:
    ((weights, *_),) = gang.run(1, carry_out, tmp_path / "plain", settings(shapes))
    config = settings(shapes, data={"cache": tmp_path / "decoded"}, num_workers=1)
    for number in range(2):  # the second run finds all of them
        for other in gang.run(3, carry_out, tmp_path / str(number), config):
            assert other[0] == weights
    kept = list((tmp_path / "decoded").glob("??/*"))
    assert len(kept) >= 100
    assert not [path for path in kept if "partial" in path.name]


def test_a_resnet_too_gives_one_hash(gang: Gang, shapes: Path, tmp_path: Path) -> None:
    config = settings(shapes, model={"name": "resnet18"}).model_copy(update={"global_batch": 40, "micro_batch": 8})
    config = config.model_copy(update={"epochs": 1})
    ((weights, figures, *_),) = gang.run(1, carry_out, tmp_path / "1", config, -1, False)
    for other in gang.run(3, carry_out, tmp_path / "3", config, -1, False):
        assert other[:2] == (weights, figures)


def _recording(gang: Gang, root: Path, folder: Path) -> dict[str, Any]:
    ((weights, _, losses, _),) = gang.run(1, carry_out, folder, settings(root))
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__.partition("+")[0],
        "losses": [round(loss, 7) for loss in losses],
        "weights_sha256": weights,
    }


def test_twenty_steps_are_the_recorded_ones(gang: Gang, shapes: Path, tmp_path: Path) -> None:
    recorded, now = json.loads(RECORDED.read_text()), _recording(gang, shapes, tmp_path / "run")
    assert len(now["losses"]) == 20
    # On another processor, or with another JPEG library, the last digits differ, and grow apart over the steps.
    assert now["losses"][:6] == pytest.approx(recorded["losses"][:6], rel=1e-2)
    if (now["cpu"], now["torch"]) == (recorded["cpu"], recorded["torch"]):
        assert now == recorded


if __name__ == "__main__":
    ranks = Gang(1)
    with tempfile.TemporaryDirectory() as place:
        recording = _recording(ranks, _made(Path(place) / "shapes"), Path(place) / "run")
        RECORDED.write_text(json.dumps(recording, indent=1) + "\n")
    ranks.end()
