"""A run on a processor with other kernels, as ATEN_CPU_CAPABILITY makes one: refused at a resume and between ranks."""

import json
import shutil
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the kernels of this processor. Not to be changed."""
    folder = tmp_path_factory.mktemp("here")
    samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


def test_a_resume_on_another_processor_is_refused_by_default_and_possible_on_request(run: Path, tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--procs", 1, "--run-dir", shutil.copytree(run, tmp_path / "run")]
    refused = samebits(*command, "--resume", "auto", cwd=tmp_path, code=5, **OTHER)
    assert "CPU capability" in refused.stderr
    assert "Traceback" not in refused.stderr
    told = samebits(*command, "--resume", "auto", "checkpoint.on_change=warn", cwd=tmp_path, **OTHER)
    assert "changed since the checkpoint of this run" in " ".join(told.stdout.split())
    worlds = json.loads((tmp_path / "run" / "environment.json").read_text())["worlds"]
    assert [world["environment"]["CPU capability"] for world in worlds][1:] == ["DEFAULT"]


def test_ranks_with_different_processors_are_refused_by_name(tmp_path: Path) -> None:
    join = ["--init", f"tcp://127.0.0.1:{own_port()}", "--world-size", 2, "--run-dir", tmp_path / "run"]
    ranks = [
        start("train", TINY, "epochs=1", *join, "--rank", rank, cwd=tmp_path, **more)
        for rank, more in enumerate([{}, OTHER])
    ]
    (_, first), _ = communicate_all(ranks)
    assert [process.returncode for process in ranks] == [4, 4]
    assert "CPU capability: DEFAULT on rank 1" in first


def test_a_restart_on_another_processor_is_refused_before_training(run: Path, tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--run-dir", run]
    # As torchrun starts a process anew, here on another machine.
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(own_port()), "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    refused = samebits(*command, cwd=tmp_path, code=5, **world, **OTHER)
    assert "CPU capability" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_resume_under_another_choice_of_onednn_or_mkl_is_refused(run: Path, tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--procs", 1, "--run-dir", run]
    for name, value in (("ONEDNN_MAX_CPU_ISA", "SSE41"), ("MKL_CBWR", "COMPATIBLE")):
        refused = samebits(*command, "--resume", "auto", cwd=tmp_path, code=5, **{name: value})
        assert f"{name}: none in the checkpoint, {value} now" in refused.stderr


def trained(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())["weights_sha256"]


PORTABLE = ("epochs=1", "kernels=portable")


def test_a_portable_run_has_one_hash_in_any_world_on_any_processor(tmp_path: Path) -> None:
    samebits("train", TINY, *PORTABLE, "--procs", 1, "--run-dir", tmp_path / "one", cwd=tmp_path)
    other = {**OTHER, "MKL_CBWR": "COMPATIBLE"}
    samebits("train", TINY, *PORTABLE, "--procs", 2, "--run-dir", tmp_path / "two", cwd=tmp_path, **other)
    join = ["--init", f"tcp://127.0.0.1:{own_port()}", "--world-size", 2, "--run-dir", tmp_path / "mixed"]
    ranks = [
        start("train", TINY, *PORTABLE, *join, "--rank", rank, cwd=tmp_path, **more)
        for rank, more in enumerate([{}, OTHER])
    ]
    errors = communicate_all(ranks)
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert trained(tmp_path / "one") == trained(tmp_path / "two") == trained(tmp_path / "mixed")
    verified = samebits("verify", tmp_path / "one", cwd=tmp_path, **OTHER)
    assert "verified" in verified.stdout
    refused = samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "one", "--resume", "auto",
                       cwd=tmp_path, code=2)  # fmt: skip
    assert "kernels: portable in the run, auto now" in refused.stderr


def test_a_portable_run_is_resumed_on_another_processor(tmp_path: Path) -> None:
    whole, command = tmp_path / "whole", ["train", TINY, "kernels=portable", "epochs=1", "--procs", 1]
    samebits(*command, "--run-dir", whole, cwd=tmp_path)
    samebits(*command, "--run-dir", tmp_path / "run", "--stop-after", 3, cwd=tmp_path)
    resumed = samebits(*command, "--run-dir", tmp_path / "run", "--resume", "auto", cwd=tmp_path, **OTHER)
    assert "changed since the checkpoint" not in resumed.stdout
    assert trained(tmp_path / "run") == trained(whole)
