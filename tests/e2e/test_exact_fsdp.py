"""A run that is sharded by whole tensors, killed and resumed on fewer processes, has the weights and records of ddp."""

from pathlib import Path

import pytest

from tests.runs import ROOT, chain, records, running, samebits, wait_until, weights

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]
RECIPE = ROOT / "tests" / "e2e" / "stuck_recipe.py"
SETTINGS = [RECIPE, "data.num_samples=201", "optim.clip_norm=0.5", "checkpoint.every=2 steps", "report.every_steps=1"]


def test_a_killed_run_resumed_on_fewer_processes_has_the_weights_and_records_of_ddp(tmp_path: Path) -> None:
    whole, run, slow = tmp_path / "whole", tmp_path / "run", tmp_path / "slow"
    samebits("train", *SETTINGS, "--procs", 1, "--run-dir", whole, cwd=tmp_path)
    slow.touch()
    more = ["parallel=fsdp", "data.slow_s=0.2", f"data.slow_while={slow}"]
    with running("train", *SETTINGS, *more, "--procs", 3, "--run-dir", run, cwd=tmp_path):
        wait_until(lambda: len(records(run, "train")) > 4)
    assert not (run / "result.json").exists()
    slow.unlink()
    samebits("train", "--run-dir", run, "--resume", "auto", "--procs", 2, cwd=tmp_path)
    assert weights(run) == weights(whole)
    assert chain(run) == chain(whole)
    samebits("verify", run, cwd=tmp_path)
