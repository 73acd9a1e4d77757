"""Streams that are full, and a current folder that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.main import run
from tests.runs import environment

COMMAND = f"{sys.executable} -m lockstep"


def shell(line: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=110
    )


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("config digits >/dev/full", 1, "error: can't write any more: No space left on device\n  do  make room\n"),
        ("config digits >/dev/full 2>&1", 1, ""),
        ("config nothing 2>/dev/full", 2, ""),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_is_full_while_printing_is_said_in_one_line(
    tmp_path: Path, line: str, code: int, said: str, unbuffered: str
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = shell(f"{COMMAND} {line}", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_current_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["train", "digits", "--run-dir", "X"]) == 2
    assert capsys.readouterr().err == ("config error: the current folder no longer exists\n  do  cd to one that does\n")
