"""Records that were altered before a resume are named then, not only when the finished run is verified."""

import contextlib
import io
from pathlib import Path

import pytest

from benchmarks.verify_trials.forgery import edit_evaluation
from benchmarks.verify_trials.runs import alone, prepare_process, train_in, train_until, verified

WARNING = "are not those of the checkpoint: the file was altered"


def stopped_and_resumed(run: Path, change: bool, stops: tuple[int, ...] = (12,)) -> str:
    """Train with stops, and return what the last resume prints."""
    prepare_process()
    with alone() as world:
        for number, stop in enumerate(stops):
            assert not train_until(world, run, stop_at=stop, resume="auto" if number else "never")
        if change:
            edit_evaluation(run, 5, top1=0.123)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            assert train_in(world, run, resume="auto") == 0
    return output.getvalue()


@pytest.mark.parametrize("stops", [(12,), (7, 13)])
def test_an_evaluation_that_was_altered_before_a_resume_is_named(tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert WARNING in stopped_and_resumed(tmp_path / "run", True, stops)
    assert not verified(tmp_path / "run").is_verified


@pytest.mark.parametrize("stops", [(12,), (7, 13), (3,)])
def test_resumes_of_an_honest_run_warn_of_nothing(tmp_path: Path, stops: tuple[int, ...]) -> None:
    assert WARNING not in stopped_and_resumed(tmp_path / "run", False, stops)
    assert verified(tmp_path / "run").is_verified
