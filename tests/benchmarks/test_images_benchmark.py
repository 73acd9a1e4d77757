"""The benchmark of image loaders: all take turns on a small folder; wrong options are no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from samebits.recipes.classify.config import MakeConfig
from samebits.recipes.classify.make import make
from tests.runs import environment


def bench(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.images", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_all_loaders_take_turns(tmp_path: Path) -> None:
    make(MakeConfig(num_per_class=2, size_px=60), tmp_path / "shapes")
    run = bench(tmp_path, "--data", "shapes", "--rounds", "1", "--batch", "2", "--pictures", "4")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("images/s") == 8


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "the folder nowhere can't be read"),
        (["--data", ".", "--rounds", "0"], "argument --rounds: invalid count value: '0'"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, arguments: list[str], said: str) -> None:
    run = bench(tmp_path, *arguments)
    assert run.returncode != 0
    assert said in run.stderr
    assert "Traceback" not in run.stderr
