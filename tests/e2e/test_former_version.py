"""Run folders that version 0.1.0 wrote: `tests/fixtures/run_of_0_1`, made by the command in its environment.json.

Settings have been renamed since: its config.yaml and checkpoints hold `watch.drift_every`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runs import samebits

FORMER = Path(__file__).resolve().parents[1] / "fixtures" / "run_of_0_1"


def recorded() -> dict[str, float]:
    metrics: dict[str, float] = json.loads((FORMER / "result.json").read_text())["metrics"]
    return metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FORMER, tmp_path / "run"))


def test_the_run_folder_of_a_former_version_still_has_former_names() -> None:
    assert "drift_every: 10 steps" in (FORMER / "config.yaml").read_text()
    assert "drift_every" in (FORMER / "checkpoints" / "step-000023" / "state.json").read_text()


@pytest.mark.full
def test_the_run_folder_of_a_former_version_evaluates_to_its_recorded_metrics(run: Path, tmp_path: Path) -> None:
    done = samebits("eval", run, "--json", cwd=tmp_path)
    assert json.loads(done.stdout) == pytest.approx(recorded(), rel=1e-4)


def test_the_run_folder_of_a_former_version_resumes(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000046")
    (run / "result.json").unlink()
    (run / "weights.safetensors").unlink()
    (run / "checkpoints" / "best.json").unlink()
    samebits("train", "--run-dir", run, "--resume", "auto", "checkpoint.on_change=warn", "--procs", 1, cwd=tmp_path)
    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 46
    assert [world["from_step"] for world in result["worlds"]] == [0, 23]
    assert result["metrics"] == pytest.approx(recorded(), rel=1e-3)
    state = json.loads((run / "checkpoints" / "step-000046" / "state.json").read_text())
    assert "replica_check_every" in json.dumps(state)
