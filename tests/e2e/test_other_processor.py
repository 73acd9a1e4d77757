"""A run on a processor with other kernels, as ATEN_CPU_CAPABILITY makes one: refused at a resume and between ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.runs import LONG_S, TINY, kill_session, lockstep, start

OTHER = {"ATEN_CPU_CAPABILITY": "default"}


@pytest.fixture(autouse=True)
def _has_other_kernels() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no other kernels than the default ones")


@pytest.mark.slow
def test_a_resume_on_another_processor_is_refused_by_default(tmp_path: Path) -> None:
    command = ["train", TINY, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "run"]
    lockstep(*command, cwd=tmp_path)
    refused = lockstep(*command, "--resume", "auto", cwd=tmp_path, code=5, **OTHER)
    assert "CPU capability" in refused.stderr
    assert "Traceback" not in refused.stderr
    told = lockstep(*command, "--resume", "auto", "checkpoint.on_change=warn", cwd=tmp_path, **OTHER)
    assert "changed since the checkpoint of this run" in " ".join(told.stdout.split())
    worlds = json.loads((tmp_path / "run" / "environment.json").read_text())["worlds"]
    assert [world["environment"]["CPU capability"] for world in worlds][1:] == ["DEFAULT"]


@pytest.mark.full
@pytest.mark.slow
def test_ranks_with_different_processors_are_refused_by_name(tmp_path: Path) -> None:
    join = ["--init", f"file://{tmp_path}/meet", "--world-size", 2, "--run-dir", tmp_path / "run"]
    ranks = [
        start("train", TINY, "epochs=1", *join, "--rank", rank, cwd=tmp_path, **more)
        for rank, more in enumerate([{}, OTHER])
    ]
    try:
        errors = [process.communicate(timeout=LONG_S)[1] for process in ranks]
    finally:
        for process in ranks:
            kill_session(process)
    assert [process.returncode for process in ranks] == [4, 4]
    assert "CPU capability: DEFAULT on rank 1" in errors[0]
