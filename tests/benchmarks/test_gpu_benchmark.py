"""`make bench-gpu`: what it would do without a GPU, and its report, made on the CPU here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import Part, run, sizes
from tests.runs import environment


def bench(cwd: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("num_gpus", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_numbers_of_gpus(num_gpus: int, expected: list[int]) -> None:
    assert sizes(num_gpus) == expected


@pytest.mark.full
def test_without_a_gpu_it_prints_the_commands(tmp_path: Path) -> None:
    done = bench(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "No CUDA device is available here" in done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line[:1].islower()] == [
        "bits", "images", "peers",
    ]  # fmt: skip
    assert "$ samebits train digits epochs=2 device=cuda --procs 1 --run-dir " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = bench(tmp_path, "--parts", "bits,bit")
    assert done.returncode == 2
    assert "no such part: bit; there are bits, images, peers" in done.stderr


@pytest.mark.lab
def test_the_report_has_the_weights_of_one_and_two_processes(tmp_path: Path) -> None:
    done = bench(tmp_path, "--parts", "bits", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    ((what, value, is_ok), *_) = json.loads((tmp_path / "gpu-report.json").read_text())["parts"]["bits"]
    assert (what, is_ok) == ("weights on 1,2", True)
    assert len(value) == 12


def test_a_command_that_fails_is_reported_and_the_next_part_runs(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Part("broken", "fails", [[sys.executable, "-c", "import sys; sys.exit('no disk')"]], lambda _: iter(()))
    (row,) = run(broken, {})
    assert not row.is_ok
    assert "exit code 1: no disk" in row.value
    assert "$ python -c " in capsys.readouterr().out
