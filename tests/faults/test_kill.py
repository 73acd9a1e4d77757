"""kill -9 of a random rank at random moments: the run continues, or is resumed, to the weights of an uninterrupted one.

`make test-faults` kills at 20 moments; FAULTS=100 FAULTS_SEED=7 at others. The seeds stand in the names of the tests.
"""

import os
from pathlib import Path

import pytest

from tests.faults.faults import SLOW, Moment, job, kill, moment
from tests.runs import result, weights

NUM_MOMENTS = int(os.environ.get("FAULTS", "3"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))
MOMENTS = [
    # `make test` kills once, in a step.
    pytest.param(at, id=str(at), marks=() if number == 0 else pytest.mark.full)
    for number, at in enumerate(moment(number, SEED + number) for number in range(NUM_MOMENTS))
]


@pytest.mark.parametrize("at", MOMENTS)
def test_a_run_whose_rank_is_killed_ends_in_the_same_weights(at: Moment, undisturbed: str, tmp_path: Path) -> None:
    folder = tmp_path
    procs = f"{at.size - 1}:{at.size}" if at.how == "fewer" else str(at.size)
    restarts = ["--max-restarts", 2] if at.how == "again" else []
    settings = [*SLOW, f"loader.num_workers={at.num_workers}"]
    with job(folder, *settings, "--procs", procs, *restarts) as running:
        was_hit = kill(running, at)
        code, said = running.ended()
        assert running.left() == []
    killed = "was killed by signal 9" in said
    if was_hit and at.how == "resume" and killed:
        assert code == 4, said
        more = ["--procs", at.next_size, "--resume", "auto"]
        with job(folder, *settings, *more) as resumed:
            code, text = resumed.ended()
            assert code == 0, said + text
            assert resumed.left() == []
    else:
        assert code == 0, said
    if killed and at.how == "again":
        assert "restart 1 of 2" in said
    if killed and at.how == "fewer":
        assert f"continuing with {at.size - 1} process" in said
    assert weights(running.run) == undisturbed, said
    print(f"{at}: {'killed' if killed else 'over before'}, worlds {result(running.run)['worlds']}")
