"""`samebits train` on a terminal, and where standard streams are closed."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import LONG_S, SAMEBITS, TINY, environment


def in_terminal(arguments: list[str], cwd: Path, interrupt_at: bytes) -> tuple[int, str]:
    """Run a command on a terminal of its own, and press Ctrl-C once it shows a text; its exit code and output."""
    variables = environment(TERM="xterm")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(SAMEBITS[0], [*SAMEBITS, *arguments], variables)
    shown, is_sent, until = b"", False, time.monotonic() + LONG_S
    while time.monotonic() < until:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the other side is closed
            break
        if interrupt_at in shown and not is_sent:
            is_sent = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def left_over(shown: str) -> list[str]:
    """The lines that a terminal still shows: what was cleared or written over is gone."""
    lines = [re.split(r"\x1b\[2K", line)[-1] for line in shown.replace("\r\n", "\n").split("\n")]
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip("\r") for line in lines]


@pytest.mark.full
def test_ctrl_c_leaves_no_sign_in_the_last_line_and_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    run = ["train", "digits", "epochs=200", "--run-dir", "demo", "--procs", "2"]
    code, shown = in_terminal(run, tmp_path, b"samples/s")
    assert code == 130
    assert "^C" in shown  # the terminal's echo
    lines = left_over(shown)
    assert not any("^C" in line or "samples/s" in line for line in lines)
    assert any(line.startswith("stopped after step") for line in lines)
    assert "\x1b[?25l" not in shown

    resume = ["train", "--run-dir", "demo", "--resume", "auto", "--procs", "1"]
    code, shown = in_terminal(resume, tmp_path, b"resume")
    assert code == 130
    assert re.search(r"samebits \S+  digits  run demo", shown)
    assert json.loads((tmp_path / "demo" / "environment.json").read_text())["name"] == "digits"


@pytest.mark.full
def test_closed_streams_do_not_keep_a_run_from_training(tmp_path: Path) -> None:
    line = f"{sys.executable} -m samebits train {TINY} --procs 2 --run-dir run <&- >&- 2>&-"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=LONG_S
    )
    log = tmp_path / "run" / "logs" / "launcher.log"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    assert (tmp_path / "run" / "result.json").exists()
    assert done.stderr == ""
