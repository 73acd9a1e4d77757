"""Twenty steps of training beside recorded ones: what training computes changes only where that is meant."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from lockstep.engine.environment import cpu_name
from tests.ranks.gang import Gang

# In a world of one, with files in a new folder: the hash of the final weights, and the loss of each step.
Training = Callable[[Gang, Path], tuple[str, Sequence[float]]]


def check_recorded(file: Path, train: Training, gang: Gang, folder: Path, *, tolerance: float = 1e-3) -> None:
    """Train and compare; on another processor last digits differ and grow apart, so there the first losses count."""
    recorded, now = json.loads(file.read_text()), _facts(train, gang, folder)
    assert len(now["losses"]) == 20
    assert now["losses"][:6] == pytest.approx(recorded["losses"][:6], rel=tolerance)
    if (now["cpu"], now["torch"]) == (recorded["cpu"], recorded["torch"]):
        assert now == recorded


def record(file: Path, train: Training) -> None:
    """Train, and write down what to compare with from now on."""
    gang = Gang(1)
    with tempfile.TemporaryDirectory() as place:
        file.write_text(json.dumps(_facts(train, gang, Path(place)), indent=1) + "\n")
    gang.end()


def _facts(train: Training, gang: Gang, folder: Path) -> dict[str, str | list[float]]:
    weights, losses = train(gang, folder)
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__.partition("+")[0],
        "losses": [round(loss, 6) for loss in losses],
        "weights_sha256": weights,
    }
