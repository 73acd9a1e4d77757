"""The moving average of the weights. That it is equal in all worlds is tested in `test_run_worlds.py`."""

from pathlib import Path

import torch

from samebits.storage.checkpoint import load_checkpoint
from samebits.storage.run_weights import weights_of
from samebits.storage.weights import weights_sha256
from tests.ranks.rank_pool import RankPool
from tests.ranks.runs_in_ranks import carry_out, settings

AVERAGED = settings(optim={"ema": 0.9, "decay_norms_and_biases": False, "weight_decay": 0.1}, every="1 epoch")


def test_the_average_is_what_is_evaluated_and_what_a_checkpoint_gives(pool: RankPool, tmp_path: Path) -> None:
    _, averaged, *_ = pool.run(1, carry_out, tmp_path / "averaged", AVERAGED)[0]
    plain = settings(optim={"decay_norms_and_biases": False, "weight_decay": 0.1}, every="1 epoch")
    _, without, *_ = pool.run(1, carry_out, tmp_path / "plain", plain)[0]
    assert averaged["metrics"]["loss"] != without["metrics"]["loss"]
    checkpoint = load_checkpoint(tmp_path / "averaged" / "checkpoints" / "step-000008")
    same = load_checkpoint(tmp_path / "plain" / "checkpoints" / "step-000008")
    assert weights_sha256(checkpoint.weights) == weights_sha256(same.weights), "training is as it was"
    _, given = weights_of(tmp_path / "averaged", "last")
    assert weights_sha256(given) == weights_sha256(checkpoint.average)
    assert weights_sha256(given) != weights_sha256(checkpoint.weights)
    statistics = [name for name in given if name.endswith("running_mean")]
    assert statistics
    assert not any(torch.equal(given[name], checkpoint.weights[name]) for name in statistics)
