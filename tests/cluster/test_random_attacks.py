"""Runs under random attack end in the right weights, or with a text and a code; never otherwise.

ATTACKS sets how many runs are attacked, ATTACKS_SEED which ones: make fuzz.
"""

import os
from pathlib import Path

import pytest
import trials

from tests.runs import TINY, samebits, weights

NUM_ATTACKS = int(os.environ.get("ATTACKS", "1"))
SEED = int(os.environ.get("ATTACKS_SEED", "3"))


@pytest.mark.lab
@pytest.mark.timeout(0)
def test_no_run_under_attack_ends_in_other_weights_or_without_a_text(tmp_path: Path) -> None:
    samebits("train", TINY, *trials.SETTINGS, "--procs", 1, "--run-dir", tmp_path / "alone", cwd=tmp_path)
    expected = weights(tmp_path / "alone")
    for seed in range(SEED, SEED + NUM_ATTACKS):
        outcome = trials.run_trial(trials.Trial(seed), tmp_path / str(seed), expected)
        print(outcome)
        assert not outcome["faults"], outcome
