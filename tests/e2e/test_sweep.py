"""`samebits sweep` as users run it: each trial is the run that it would be alone."""

from pathlib import Path

import pytest

from tests.e2e.sweeps import COMMON, STEPS, sweep, table
from tests.runs import TINY, samebits, weights

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]  # each trial is a process that imports torch


def test_a_trial_has_the_hash_of_the_same_training_alone(tmp_path: Path) -> None:
    grid = [*COMMON, *STEPS, "--grid", "optim.gamma=0.1,0.5", "max_steps=14,20"]
    out = sweep(TINY, *grid, "--jobs", "2", "--sweep-dir", "sweep", cwd=tmp_path)
    assert "4 trials, 2 side by side" in out
    found = table(tmp_path / "sweep")
    assert [trial["state"] for trial in found.values()] == ["done"] * 4
    alone = ["optim.gamma=0.5", "max_steps=20", "--run-dir", tmp_path / "alone", "--procs", 2]
    samebits("train", TINY, *COMMON, *STEPS, *alone, cwd=tmp_path)
    assert found["trial-0004"]["weights_sha256"] == weights(tmp_path / "alone")
    samebits("verify", tmp_path / "sweep" / "trial-0004", "--all", cwd=tmp_path)
    samebits("report", tmp_path / "sweep", "--out", tmp_path / "sweep.html", cwd=tmp_path)
    page = (tmp_path / "sweep.html").read_text()
    assert all(trial["weights_sha256"][:8] in page for trial in found.values())
