"""What the launcher prints about a failed rank: errors are wrapped on a terminal, and whole everywhere else."""

import io
import signal
import sys
from pathlib import Path

import pytest

from samebits.errors import cannot_write
from samebits.launch.supervisor import Supervisor

ERROR = str(cannot_write("runs/classify-0001/checkpoints/step-000001", OSError(28, "No space left on device")))
TRACEBACK = "Traceback (most recent call last):\n" + "  File a.py, line 1, in f " + "with a long line " * 6


@pytest.mark.parametrize(
    ("text", "is_terminal", "is_wrapped"), [(ERROR, True, True), (ERROR, False, False), (TRACEBACK, True, False)]
)
def test_an_error_of_a_rank_is_wrapped_between_words_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_terminal: bool, is_wrapped: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "70")
    Supervisor(tmp_path, 1.0, tmp_path / "logs", lambda: signal.SIGINT.name).report(text)
    shown = stream.getvalue().replace("\x1b[2K", "").lstrip("\r")
    assert shown.split() == text.split()
    assert (max(map(len, shown.splitlines())) <= 70) == is_wrapped
    if is_wrapped:
        assert "\n       " in shown  # what follows a slot is indented
    assert text in (tmp_path / "logs" / "launcher.log").read_text(encoding="utf-8")
