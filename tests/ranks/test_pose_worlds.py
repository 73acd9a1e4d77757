"""The pose recipe over real processes: one hash in all worlds and after stops, and 20 steps beside recorded ones.

Where a change of what training computes is meant, `python -m tests.ranks.test_pose_worlds` records anew; the commit
then says why.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.environment import cpu_name
from tests.ranks.gang import Gang
from tests.ranks.pose_in_ranks import carry_out, settings

RECORDED = Path(__file__).with_name("pose_recorded.json")


@pytest.mark.parametrize("batch_norm", ["micro", "sync"])
def test_pose_gives_one_hash_in_all_worlds_and_after_a_stop(gang: Gang, tmp_path: Path, batch_norm: str) -> None:
    config = settings(batch_norm=batch_norm)
    ((weights, figures, losses, is_done),) = gang.run(1, carry_out, tmp_path / "1", config)
    assert is_done
    assert len(losses) == 10
    for world in (2, 3):
        for other in gang.run(world, carry_out, tmp_path / str(world), config):
            assert other == (weights, figures, losses, True)
    gang.run(2, carry_out, tmp_path / "stopped", config, 4)
    for other in gang.run(3, carry_out, tmp_path / "stopped", config):
        assert other[:2] == (weights, figures)
        assert other[2] == losses[5:]


def _recording(gang: Gang, folder: Path) -> dict[str, Any]:
    ((weights, _, losses, _),) = gang.run(1, carry_out, folder, settings().model_copy(update={"epochs": 4}))
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__.partition("+")[0],
        "losses": [round(loss, 7) for loss in losses],
        "weights_sha256": weights,
    }


def test_twenty_steps_are_the_recorded_ones(gang: Gang, tmp_path: Path) -> None:
    recorded, now = json.loads(RECORDED.read_text()), _recording(gang, tmp_path / "run")
    assert len(now["losses"]) == 20
    # On another processor the last digits differ, and grow apart over the steps.
    assert now["losses"][:6] == pytest.approx(recorded["losses"][:6], rel=1e-3)
    if (now["cpu"], now["torch"]) == (recorded["cpu"], recorded["torch"]):
        assert now == recorded


if __name__ == "__main__":
    ranks = Gang(1)
    with tempfile.TemporaryDirectory() as place:
        RECORDED.write_text(json.dumps(_recording(ranks, Path(place) / "run"), indent=1) + "\n")
    ranks.end()
