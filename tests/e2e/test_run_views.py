"""A run that is killed once: its report has the fault and the restart."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs import TINY, records, running, samebits, wait_until

pytestmark = pytest.mark.full


def test_the_table_and_the_report_follow_a_run_through_a_restart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = tmp_path / "slow"
    slow.touch()
    settings = ["epochs=6", "report.every_steps=1", "data.slow_s=0.3", f"data.slow_while={slow}"]
    with running(
        "train", TINY, *settings, "--procs", 2, "--max-restarts", 2, "--run-dir", run, cwd=tmp_path
    ) as training:
        wait_until(lambda: len(records(run, "eval")) >= 1)
        assert "running" in samebits("runs", tmp_path, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout
        owner = re.fullmatch(r"process (\d+) on .+\n", (run / "run.lock").read_text())
        os.kill(int(owner[1]), signal.SIGKILL)
        slow.unlink()
        _, err = training.communicate(timeout=180)
        assert training.returncode == 0, err
    assert "done" in samebits("runs", tmp_path, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout
    samebits("report", run, cwd=tmp_path)
    page = (run / "report.html").read_text()
    kinds = re.findall(r'<span class="(start|fault|restart|done)">', page)
    # Once without the lost process, and again when its replacement has joined.
    assert re.fullmatch(r"start fault restart( start){1,2} done", " ".join(kinds)), kinds
    assert "was killed by signal 9 (SIGKILL)" in page
    assert "complete after step 30" in page
