"""A run that is killed once: another terminal follows it, and its report has the fault and the restart."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.runs import TINY, kill_session, records, samebits, start, wait_until

pytestmark = pytest.mark.full


def test_a_run_is_watched_through_a_restart_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = tmp_path / "slow"
    slow.touch()
    settings = ["epochs=6", "report.every_steps=1", "data.slow_s=0.3", f"data.slow_while={slow}"]
    training = start("train", TINY, *settings, "--procs", 2, "--max-restarts", 2, "--run-dir", run, cwd=tmp_path)
    watching = None
    try:
        wait_until(lambda: len(records(run, "eval")) >= 1)
        watching = start("watch", run, cwd=tmp_path)
        assert watching.stdout is not None
        assert re.search(r"epoch \d/6  step \d+/30  loss", watching.stdout.readline())
        assert "running" in samebits("runs", tmp_path, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout
        owner = re.fullmatch(r"process (\d+) on .+\n", (run / "run.lock").read_text())
        assert owner is not None
        os.kill(int(owner[1]), signal.SIGKILL)
        slow.unlink()
        _, err = training.communicate(timeout=180)
        assert training.returncode == 0, err
        out, err = watching.communicate(timeout=60)
        assert watching.returncode == 0, err
        assert "was killed by signal 9" in out
        assert "restart 1 of 2" in out
        assert "done on 2 processes" in out
    finally:
        for process in (training, watching):
            if process is not None:
                kill_session(process)
    assert "done" in samebits("runs", tmp_path, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")).stdout
    samebits("report", run, cwd=tmp_path)
    page = (run / "report.html").read_text()
    kinds = re.findall(r'<span class="(start|fault|restart|done)">', page)
    assert kinds == ["start", "fault", "restart", "start", "done"]
    assert "was killed by signal 9 (SIGKILL)" in page
    assert "complete after step 30" in page
