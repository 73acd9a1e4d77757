"""A run on a processor with other kernels, as ATEN_CPU_CAPABILITY makes one: refused at a resume and between ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import TINY, communicate_all, own_port, samebits, start

pytestmark = pytest.mark.full

OTHER = {"ATEN_CPU_CAPABILITY": "default"}


@pytest.fixture(autouse=True)
def _has_other_kernels() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no other kernels than the default ones")


def test_a_resume_on_another_processor_is_refused_by_default_and_possible_on_request(tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "run"]
    samebits(*command, cwd=tmp_path)
    refused = samebits(*command, "--resume", "auto", cwd=tmp_path, code=5, **OTHER)
    assert "CPU capability" in refused.stderr
    assert "Traceback" not in refused.stderr
    told = samebits(*command, "--resume", "auto", "checkpoint.on_change=warn", cwd=tmp_path, **OTHER)
    assert "changed since the checkpoint of this run" in " ".join(told.stdout.split())
    worlds = json.loads((tmp_path / "run" / "environment.json").read_text())["worlds"]
    assert [world["environment"]["CPU capability"] for world in worlds][1:] == ["DEFAULT"]


def test_ranks_with_different_processors_are_refused_by_name(tmp_path: Path) -> None:
    join = ["--init", f"file://{tmp_path}/meet", "--world-size", 2, "--run-dir", tmp_path / "run"]
    ranks = [
        start("train", TINY, "epochs=1", *join, "--rank", rank, cwd=tmp_path, **more)
        for rank, more in enumerate([{}, OTHER])
    ]
    (_, first), _ = communicate_all(ranks)
    assert [process.returncode for process in ranks] == [4, 4]
    assert "CPU capability: DEFAULT on rank 1" in first


def test_a_restart_on_another_processor_is_refused_before_training(tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--run-dir", tmp_path / "run"]
    samebits(*command, "--procs", 1, cwd=tmp_path)
    # As torchrun starts a process anew, here on another machine.
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(own_port()), "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    refused = samebits(*command, cwd=tmp_path, code=5, **world, **OTHER)
    assert "CPU capability" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_resume_under_another_choice_of_onednn_or_mkl_is_refused(tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "run"]
    samebits(*command, cwd=tmp_path)
    for name, value in (("ONEDNN_MAX_CPU_ISA", "SSE41"), ("MKL_CBWR", "COMPATIBLE")):
        refused = samebits(*command, "--resume", "auto", cwd=tmp_path, code=5, **{name: value})
        assert f"{name}: none in the checkpoint, {value} now" in refused.stderr


def trained(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())["weights_sha256"]


PORTABLE = ("epochs=1", "kernels=portable")


def test_a_portable_run_has_one_hash_in_any_world_on_any_processor(tmp_path: Path) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(own_port())}  # fmt: skip
    samebits("train", TINY, *PORTABLE, "--procs", 1, "--run-dir", tmp_path / "one", cwd=tmp_path)
    samebits("train", TINY, *PORTABLE, "--procs", 2, "--run-dir", tmp_path / "two", cwd=tmp_path, **OTHER)
    samebits("train", TINY, *PORTABLE, "--run-dir", tmp_path / "joined", cwd=tmp_path, **world, MKL_CBWR="COMPATIBLE")
    assert trained(tmp_path / "one") == trained(tmp_path / "two") == trained(tmp_path / "joined")
    samebits("eval", tmp_path / "one", cwd=tmp_path, **OTHER)
    verified = samebits("verify", tmp_path / "one", cwd=tmp_path, **OTHER)
    assert "verified" in verified.stdout
    refused = samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "one", "--resume", "auto",
                       cwd=tmp_path, code=2)  # fmt: skip
    assert "kernels: portable in the run, auto now" in refused.stderr


def test_a_portable_run_is_resumed_on_another_processor(tmp_path: Path) -> None:
    whole, command = tmp_path / "whole", ["train", TINY, "kernels=portable", "epochs=2", "--procs", 1]
    samebits(*command, "--run-dir", whole, cwd=tmp_path)
    samebits(*command, "--run-dir", tmp_path / "run", "--stop-after", 3, cwd=tmp_path)
    resumed = samebits(*command, "--run-dir", tmp_path / "run", "--resume", "auto", cwd=tmp_path, **OTHER)
    assert "changed since the checkpoint" not in resumed.stdout
    assert trained(tmp_path / "run") == trained(whole)


def test_ranks_on_several_kinds_of_processors_train_one_portable_model(tmp_path: Path) -> None:
    join = ["--init", f"file://{tmp_path}/meet", "--world-size", 2, "--run-dir", tmp_path / "mixed"]
    ranks = [
        start("train", TINY, *PORTABLE, *join, "--rank", rank, cwd=tmp_path, **more)
        for rank, more in enumerate([{}, OTHER])
    ]
    errors = communicate_all(ranks)
    assert [process.returncode for process in ranks] == [0, 0], errors
    samebits("train", TINY, *PORTABLE, "--procs", 1, "--run-dir", tmp_path / "one", cwd=tmp_path)
    assert trained(tmp_path / "mixed") == trained(tmp_path / "one")
