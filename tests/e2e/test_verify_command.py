"""`samebits verify` as a user calls it: exit codes, parts on several machines, and their merged verdict."""

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


@pytest.mark.full
def test_parts_end_with_0_and_their_verdicts_merge(tiny: Path, tmp_path: Path) -> None:
    options = []
    for part in (1, 2):
        file = tmp_path / f"part-{part}.json"
        file.write_text(samebits("verify", tiny, "--all", "--part", f"{part}/2", "--json", cwd=tmp_path).stdout)
        assert json.loads(file.read_text())["is_verified"]
        options += ["--merge", file]
    assert "verified   every step of the run" in samebits("verify", tiny, *options, cwd=tmp_path).stdout
    missing = samebits("verify", tiny, *options[:2], cwd=tmp_path, code=1).stdout
    assert "result     incomplete: steps" in missing


@pytest.mark.full
def test_verdicts_of_another_run_are_refused(tiny: Path, tmp_path: Path) -> None:
    verdict = tmp_path / "part.json"
    verdict.write_text(samebits("verify", tiny, "--steps", "0:2", "--json", cwd=tmp_path).stdout)
    samebits("train", TINY, "seed=1", "--procs", 1, "--run-dir", tmp_path / "other", cwd=tmp_path)
    errors = samebits("verify", tmp_path / "other", "--merge", verdict, cwd=tmp_path, code=2).stderr
    assert "the verdicts are not of" in errors
