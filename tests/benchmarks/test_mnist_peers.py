"""The benchmark against other tools still runs, and reports a job that fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mnist_peers
from tests.runs import LONG_S, environment


def _compare(tmp_path: Path, data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.mnist_peers", "--data", str(data), "--rounds", "1", "--steps", "25"]
    environ = environment(TMPDIR=str(tmp_path))
    return subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LONG_S
    )


@pytest.mark.full
def test_two_processes_train_and_the_figures_are_written(tmp_path: Path, mnist_folder: Path) -> None:
    job = "bound: data in memory"
    run = _compare(tmp_path, mnist_folder, "--only", job, "--out", "figures.json")
    assert run.returncode == 0, run.stderr
    (figures,) = json.loads((tmp_path / "figures.json").read_text())["jobs"][job]
    assert figures["samples_per_s"] > 0
    assert figures["first_step_s"] > 0
    assert f"| {job} |" in run.stdout


def test_a_job_that_fails_is_reported_and_fails_the_command(tmp_path: Path, mnist_folder: Path) -> None:
    run = _compare(tmp_path, mnist_folder, "--only", "Lightning", "--peers-python", "gone/python")
    assert run.returncode == 1
    assert "Lightning FAILED" in run.stderr


def test_a_folder_without_mnist_is_named(tmp_path: Path) -> None:
    run = _compare(tmp_path, tmp_path / "empty")
    assert run.returncode == 1
    assert "empty does not hold train-images-idx3-ubyte.gz" in run.stderr


def _end_badly(tmp_path: Path, figures: Path | None, writes: str) -> None:
    """Let the comparison wait for a process that writes, or does not, and aborts."""
    setting = mnist_peers.Setting(tmp_path, 1, 25, sys.executable, limit_s=30)
    code = f"import os, pathlib; pathlib.Path({writes!r}).touch(); os.abort()"
    mnist_peers._finish([[sys.executable, "-c", code]], {}, setting, tmp_path, figures)


def test_a_job_that_aborts_after_its_measurements_keeps_them_and_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _end_badly(tmp_path, tmp_path / "figures.json", writes=str(tmp_path / "figures.json"))
    assert "failed after its last step: exit codes [-6]" in capfd.readouterr().err


def test_a_job_that_aborts_before_its_figures_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[-6\]"):
        _end_badly(tmp_path, tmp_path / "figures.json", writes=str(tmp_path / "other"))


def test_samebits_itself_may_never_end_badly(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit codes \[-6\]"):
        _end_badly(tmp_path, None, writes=str(tmp_path / "figures.json"))
