"""Lines of a slow start, and the log files."""

import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.report.log import LOGGER, log_path, notice_if_slow, rank_log


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


def test_each_rank_writes_to_its_own_file(tmp_path: Path) -> None:
    for rank in (0, 3):
        with rank_log(tmp_path, rank) as log:
            log.info("this is rank %d", rank)
    assert log_path(tmp_path, 3) == tmp_path / "logs" / "rank-3.log"
    assert "this is rank 3" in log_path(tmp_path, 3).read_text()
    assert "this is rank 3" not in log_path(tmp_path, 0).read_text()


def test_a_resumed_run_continues_the_same_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with rank_log(tmp_path, 0) as log:
            log.info(text)
    assert [line.split()[-1] for line in log_path(tmp_path, 0).read_text().splitlines()] == ["first", "second"]


def test_a_warning_goes_to_the_file_and_not_to_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path, 0), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("a picture is odd", stacklevel=1)
    assert "a picture is odd" in log_path(tmp_path, 0).read_text()
    assert capfd.readouterr().err == ""


def test_an_error_is_written_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path, 0):
        _ = 1 / 0
    text = log_path(tmp_path, 0).read_text()
    assert "ended by ZeroDivisionError" in text
    assert "Traceback" in text


def test_logging_is_as_before_afterwards(tmp_path: Path) -> None:
    before = (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate)
    with rank_log(tmp_path, 0):
        pass
    assert (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate) == before


def test_a_folder_that_can_not_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file", "Not a directory"), (Path("/proc/nope"), "No such file or directory")):
        with pytest.raises(CheckpointError) as caught, rank_log(folder, 0):
            pass
        assert f"can't write {log_path(folder, 0)}: {reason}" in str(caught.value)
