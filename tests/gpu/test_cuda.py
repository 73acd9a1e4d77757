"""The same promises on a GPU; several processes share it where there is only one."""

import signal
from pathlib import Path

import pytest

from tests.runs import TINY, kill_session, processes_with, records, result, samebits, start, wait_until, weights

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    samebits("train", TINY, "device=cuda", "--procs", 1, "--run-dir", folder / "run", cwd=folder)
    return folder / "run"


@pytest.mark.parametrize("num_procs", [2, 3, 4])
def test_processes_that_share_a_gpu_give_the_bits_of_one(alone: Path, tmp_path: Path, num_procs: int) -> None:
    done = samebits("train", TINY, "device=cuda", "--procs", num_procs, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert "cuda" in done.stdout
    assert weights(tmp_path / "run") == weights(alone)
    assert result(tmp_path / "run")["metrics"] == result(alone)["metrics"]


def test_a_second_run_gives_the_same_bits(alone: Path, tmp_path: Path) -> None:
    samebits("train", TINY, "device=cuda", "loader.num_workers=2", "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(alone)


def test_digits_on_a_gpu(tmp_path: Path) -> None:
    settings = ["device=cuda", "epochs=2"]
    for num_procs in (1, 2):
        folder = tmp_path / str(num_procs)
        samebits("train", "digits", *settings, "--procs", num_procs, "--run-dir", folder, cwd=tmp_path)
    assert weights(tmp_path / "2") == weights(tmp_path / "1")


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = ["device=cuda", "data.num_samples=401", "epochs=3", "report.every_steps=1"]
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", tmp_path / "whole", cwd=tmp_path)
    folder = tmp_path / "run"
    process = start("train", TINY, *settings, "data.slow_s=0.05", "--procs", 2, "--run-dir", folder, cwd=tmp_path)
    try:
        wait_until(lambda: len(records(folder, "train")) >= 6)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    finally:
        kill_session(process)
    assert process.returncode == 130
    assert not processes_with(str(folder))
    samebits("train", TINY, *settings, "data.slow_s=0.05", "--run-dir", folder, "--resume", "auto", cwd=tmp_path)
    assert weights(folder) == weights(tmp_path / "whole")
