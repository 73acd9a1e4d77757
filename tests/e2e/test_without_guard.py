"""`samebits.evaluate` in a program without `if __name__ == "__main__"`, which multiprocessing would run once more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import LONG_S, TINY, environment, samebits

PROGRAM = """
import samebits
print("it runs")
print(samebits.evaluate("run", procs=2) == samebits.evaluate("run", {"device": "cpu"}))
"""


@pytest.mark.full
@pytest.mark.parametrize("is_file", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_program_is_run_once_whatever_it_starts(tmp_path: Path, is_file: bool) -> None:
    samebits("train", TINY, "--procs", 1, "--run-dir", tmp_path / "run", cwd=tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "mine.py" if is_file else "-"], input="" if is_file else PROGRAM, cwd=tmp_path,
        env=environment(), capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "it runs\nTrue\n"), done.stderr
