"""`samebits sweep` as users run it: steps that are trained once, and what a recipe may read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.sweeps import COMMON, STEPS, sweep, table
from tests.runs import TINY, samebits

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]  # each trial is a process that imports torch


def test_trials_with_equal_first_steps_train_them_once_to_equal_hashes(tmp_path: Path) -> None:
    grid = [*COMMON, *STEPS, "--grid", "optim.gamma=0.1,0.5", "max_steps=14,20"]
    out = sweep(TINY, *grid, "--jobs", "2", "--sweep-dir", "shared", cwd=tmp_path)
    assert "train them once: 30 steps instead of 68" in out  # 10, then 4 + 6 for each gamma
    # The first prefix has both places to itself; of the two after it, each has one.
    printed = [(tmp_path / "shared" / "output" / f"prefix-000{number}.txt").read_text() for number in (1, 2, 3)]
    assert [re.findall(r"(\d) process(?:es)? on", text)[0] for text in printed] == ["2", "1", "1"]
    sweep(TINY, *grid, "--sweep-dir", "alone", "--no-share", cwd=tmp_path)
    found = table(tmp_path / "shared")
    assert found == table(tmp_path / "alone")
    assert [trial["state"] for trial in found.values()] == ["done"] * 4
    assert not list((tmp_path / "alone").glob("prefix-*"))
    samebits("verify", tmp_path / "shared" / "trial-0004", "--all", cwd=tmp_path)
    samebits("report", tmp_path / "shared", "--out", tmp_path / "sweep.html", cwd=tmp_path)
    page = (tmp_path / "sweep.html").read_text()
    assert all(trial["weights_sha256"][:8] in page for trial in found.values())


READS_EPOCHS = """
from tests.e2e.tiny_recipe import *
from tests.e2e import tiny_recipe

def build(config):
    config.epochs
    return tiny_recipe.build(config)
"""


def test_a_recipe_that_reads_the_number_of_epochs_shares_no_steps_of_trials_with_others(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(READS_EPOCHS)
    values = ["--grid", "epochs=1,2", "--sweep-dir", "sweep"]
    out = sweep("recipe.py", *COMMON[:1], *values, cwd=tmp_path)
    assert "no shared steps: the recipe reads epochs" in out
    assert sorted(path.name for path in (tmp_path / "sweep").glob("*-0*")) == ["trial-0001", "trial-0002"]
