"""Recovery in the step that does not return: the run names it, and continues from the last checkpoint."""

import signal
from pathlib import Path

import pytest

from tests.faults.faults import SLOW, job
from tests.runs import TINY, samebits, weights

pytestmark = pytest.mark.full

TORCH_WAITS = """
import time
import torch.distributed as dist
from samebits.cluster import world
from samebits.cluster.views import regroup
dist.destroy_process_group = lambda *_: time.sleep(1000)
regroup.DESTROY_S, world.GOODBYE_S = 1.0, 0.1
"""
NEVER_ENTERS = """
import time
from samebits.engine import in_step
in_step.regroup = lambda *_: time.sleep(1000)
"""
SURVIVOR_WAITS_FOR_ITS_FOLDER = """
import time
from samebits.engine.opening import OpenRun
OpenRun.take_over = lambda _: time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (TORCH_WAITS, "torch has not ended the group of the last view"),
        (NEVER_ENTERS, "the run has made no progress for 3 s: entering the next world"),
        (SURVIVOR_WAITS_FOR_ITS_FOLDER, "the run has made no progress for 3 s"),
    ],
)
def test_a_recovery_that_does_not_return_becomes_a_restart(
    undisturbed: str, tmp_path: Path, fault: str, said: str
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(TINY.read_text() + fault)
    samebits("trust", recipe, cwd=tmp_path)
    settings = (*SLOW, "watch.hang_timeout_s=3", "--procs", 2, "--max-restarts", 2)
    with job(tmp_path, *settings, source=recipe) as running:
        running.wait_for_step(4)
        running.workers()[0].send_signal(signal.SIGKILL)
        code, output = running.ended()
    assert code == 0, output
    assert said in output
    assert "restart 2 of 2 from the last checkpoint" in output
    assert weights(running.run) == undisturbed
