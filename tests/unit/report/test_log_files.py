import logging
import warnings
from pathlib import Path

import pytest

from samebits.errors import CheckpointError
from samebits.report.log import LOGGER, log_path, rank_log


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
