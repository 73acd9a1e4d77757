"""Training where standard streams are closed, as under some schedulers."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import LONG_S, TINY, environment


@pytest.mark.full
@pytest.mark.parametrize("closed", [pytest.param(">&-", marks=pytest.mark.full), "<&- >&- 2>&-"])
def test_closed_streams_do_not_keep_a_run_from_training(tmp_path: Path, closed: str) -> None:
    line = f"{sys.executable} -m samebits train {TINY} --procs 2 --run-dir run {closed}"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LONG_S
    )
    log = tmp_path / "run" / "logs" / "launcher.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    assert (tmp_path / "run" / "result.json").exists()
    assert done.stderr == ""
