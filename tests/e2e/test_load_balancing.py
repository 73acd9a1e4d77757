"""cluster.load_balancing: a slow rank gets fewer micro-batches, and the weights stay those of an undisturbed run."""

import re
import signal
from pathlib import Path

import pytest

from tests.faults.faults import SETTINGS, job
from tests.runs import samebits, weights

pytestmark = pytest.mark.timeout(600)
SLOW_RANK = """
import time
import torch.distributed as dist
from tests.e2e.tiny_recipe import *
from tests.e2e import tiny_recipe

def build(config):
    parts = tiny_recipe.build(config)
    read = tiny_recipe.Pictures.batch
    def batch(self, indices, keys):
        if len(self) > 100 and dist.is_initialized():
            time.sleep(0.06 if dist.get_rank() == 1 else 0.02)
        return read(self, indices, keys)
    tiny_recipe.Pictures.batch = batch
    return parts
"""


def recipe(folder: Path) -> Path:
    path = folder / "slow_rank.py"
    path.write_text(SLOW_RANK)
    return path


@pytest.mark.full
def test_a_slow_rank_gets_fewer_micro_batches_and_no_bit_changes(tmp_path: Path) -> None:
    common = ["train", recipe(tmp_path), *SETTINGS, "loader.num_workers=1"]
    samebits(*common, "--procs", 1, "--run-dir", "one", cwd=tmp_path)
    balanced = ["cluster.load_balancing=true", "--procs", 2, "--run-dir", "two"]
    out = samebits(*common, *balanced, cwd=tmp_path).stdout
    counts = [
        (int(first), int(second))
        for first, second in re.findall(r"micro-batches of rank 0, 1, ... are (\d), (\d)", out)
    ]
    assert counts, out
    assert all(first + second == 6 for first, second in counts), out
    assert counts[0][0] > 3 > counts[0][1]
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    samebits("verify", "two", "--all", cwd=tmp_path)


@pytest.mark.lab
def test_a_lost_process_does_not_end_load_balancing(tmp_path: Path) -> None:
    source, settings = recipe(tmp_path), ["epochs=3", "loader.num_workers=0"]
    samebits("train", source, *SETTINGS, *settings, "--procs", 1, "--run-dir", "one", cwd=tmp_path)
    options = ["cluster.load_balancing=true", "cluster.recovery=in_step", "--procs", 3, "--max-restarts", 1]
    with job(tmp_path, *settings, *options, source=source) as running:
        running.wait_for_step(20)  # the work is divided again after two seconds of training
        running.workers()[0].send_signal(signal.SIGKILL)
        code, said = running.ended()
    assert code == 0, said
    assert "load balancing" in said.partition("continuing with")[0]
    assert weights(running.run) == weights(tmp_path / "one")
