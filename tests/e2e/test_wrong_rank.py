"""A run with a rank that computes wrong values, as a user sees it (`watch.recheck`)."""

import json
from pathlib import Path

import pytest

from tests.runs import ROOT, samebits

WRONG = ROOT / "tests" / "e2e" / "wrong_rank_recipe.py"


def sha256(run: Path) -> str:
    return str(json.loads((run / "result.json").read_text())["weights_sha256"])


@pytest.mark.full
def test_a_wrong_rank_is_named_on_the_console_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    right, run = tmp_path / "right", tmp_path / "run"
    samebits("train", WRONG, "epochs=1", "--procs", 1, "--run-dir", right, cwd=tmp_path, WRONG_FROM="20")
    command = ["train", WRONG, "epochs=1", "watch.recheck=1/1", "--procs", 3, "--run-dir", run]
    done = samebits(*command, cwd=tmp_path, WRONG_FROM="8")
    assert "training error: rank 1 computed wrong values: micro-batch" in done.stdout
    assert "the step was repeated with equal results" in done.stdout
    assert sha256(run) == sha256(right)


@pytest.mark.full
def test_a_rank_that_is_always_wrong_ends_the_run(tmp_path: Path) -> None:
    command = ["train", WRONG, "watch.recheck=1/1", "--procs", 3, "--run-dir", tmp_path / "run"]
    done = samebits(*command, cwd=tmp_path, code=6, WRONG_FROM="8", WRONG_TO="999")
    assert "rank 1 computed wrong values" in done.stderr
    assert "Traceback" not in done.stderr
