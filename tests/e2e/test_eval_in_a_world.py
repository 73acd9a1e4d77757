"""`samebits eval` in processes of another launcher, and of sharded runs."""

import json
from pathlib import Path

import pytest

from tests.runs import TINY, TORCHRUN, python, result, samebits


@pytest.mark.full
def test_eval_under_torchrun_prints_once_and_the_same_as_alone(tmp_path: Path) -> None:
    samebits("train", TINY, "--procs", 1, "--run-dir", tmp_path / "run", cwd=tmp_path)
    alone = json.loads(samebits("eval", tmp_path / "run", "--json", cwd=tmp_path).stdout)
    done = python(*TORCHRUN, 2, "-m", "samebits", "eval", tmp_path / "run", "--json", cwd=tmp_path)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [alone]


@pytest.mark.full
def test_a_sharded_run_is_evaluated_and_used_by_one_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    samebits("train", "digits", "epochs=1", "mode=fast", "parallel=fsdp", "--procs", 2, "--run-dir", run, cwd=tmp_path)
    metrics = json.loads(samebits("eval", run, "--json", cwd=tmp_path).stdout)
    assert metrics["top1"] == result(run)["metrics"]["top1"] > 0.5
    assert samebits("export", run, "--to", "safetensors", "--out", tmp_path / "net", cwd=tmp_path).returncode == 0
