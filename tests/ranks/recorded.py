"""Twenty training steps compared with recorded ones, so that results change only on purpose."""

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from samebits.provenance.fingerprint import cpu_name
from tests.ranks.rank_pool import RankPool

# In a world of one, with files in a new folder: the hash of the final weights, and the loss of each step.
Training = Callable[[RankPool, Path], tuple[str, Sequence[float]]]


# The last digits differ between processors and grow over the steps: ReLUs flip, and Adam takes the sign of a gradient
# that is near zero. Measured on kernels for AVX-512, AVX2 and no vectors, of Intel and AMD: in 20 steps up to 1e-2.
LATER_TOLERANCE = 3e-2


def check_recorded(
    file: Path, train: Training, pool: RankPool, folder: Path, *, num_close: int = 6, tolerance: float = 1e-3
) -> None:
    """Train and compare: every bit on the processor of the recording, elsewhere what rounding leaves of the losses.

    Args:
        file: What `record` has written.
        train: The twenty steps.
        pool: Runs them.
        folder: For their files.
        num_close: How many of the first losses lie within `tolerance`, relative; the others within LATER_TOLERANCE.
        tolerance: What rounding may do to the first losses.
    """
    recorded, now = json.loads(file.read_text()), _facts(train, pool, folder)
    assert len(now["losses"]) == 20
    assert now["losses"][:num_close] == pytest.approx(recorded["losses"][:num_close], rel=tolerance)
    assert now["losses"] == pytest.approx(recorded["losses"], rel=LATER_TOLERANCE)
    if (now["cpu"], now["torch"]) == (recorded["cpu"], recorded["torch"]):
        assert now == recorded


def record(file: Path, train: Training) -> None:
    """Train, and write down what to compare with from now on."""
    pool = RankPool(1)
    with tempfile.TemporaryDirectory() as place:
        file.write_text(json.dumps(_facts(train, pool, Path(place)), indent=1) + "\n")
    pool.end()


def _facts(train: Training, pool: RankPool, folder: Path) -> dict[str, str | list[float]]:
    weights, losses = train(pool, folder)
    return {
        "cpu": cpu_name(),
        "torch": torch.__version__.partition("+")[0],
        "losses": [round(loss, 6) for loss in losses],
        "weights_sha256": weights,
    }
