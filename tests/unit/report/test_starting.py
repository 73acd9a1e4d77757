import os
import sys
import threading
import time
from pathlib import Path

import pytest

from samebits.report.starting import notice_if_slow


def test_a_slow_start_is_reported_once_and_a_quick_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    begun = threading.Event()
    with notice_if_slow("starting 3 processes", lambda: bool(begun.set()), quiet_s=0.01):
        assert begun.wait(60)
    assert capsys.readouterr().out == "starting 3 processes\n"
    with notice_if_slow("starting 3 processes", quiet_s=30):
        pass
    assert capsys.readouterr().out == ""


def test_a_line_that_would_come_too_late_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    for text, is_over in (("starting", True), ("", False)):
        with notice_if_slow(text, lambda is_over=is_over: is_over, quiet_s=0.01):
            time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_a_line_that_can_not_be_written_disturbs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    monkeypatch.setattr(threading, "excepthook", faults.append)
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with notice_if_slow("starting", quiet_s=0.01):
            time.sleep(0.1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # it is flushed when it is closed
    assert faults == []
