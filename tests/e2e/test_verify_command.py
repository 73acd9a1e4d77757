"""`samebits verify` as a user calls it: exit codes, and the steps that are compared."""

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import TINY, samebits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    settings = ["checkpoint.keep_every=2 steps", "report.tensorboard=false"]
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


def test_a_run_of_one_process_is_verified_by_two_and_a_changed_bit_is_found(tiny: Path, tmp_path: Path) -> None:
    output = samebits("verify", tiny, "--all", "--procs", 2, cwd=tmp_path).stdout
    assert "10 steps in 5 segments, root " in output
    assert output.rstrip().endswith("verified   every step of the run")
    run = tmp_path / "run"
    shutil.copytree(tiny, run)
    weights = run / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    output = samebits("verify", run, "--steps", "0:2", cwd=tmp_path, code=1).stdout
    assert "FAIL     weights.safetensors: its tensors have sha256 " in output
    assert "result     NOT verified" in output
    (run / "checkpoints" / "step-000004" / "optimizer.safetensors").write_bytes(b"")
    damaged = json.loads(samebits("verify", run, "--steps", "4:6", "--json", cwd=tmp_path, code=1).stdout)
    assert [
        text for text in damaged["mismatches"] if "checkpoints/step-000004/optimizer.safetensors is truncated" in text
    ]
