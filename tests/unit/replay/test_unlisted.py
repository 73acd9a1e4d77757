"""What a run's statement does not list, listed files that are missing, and altered records are findings."""

import contextlib
import io
import shutil
import sys
import time
from pathlib import Path

import pytest

from samebits.cli.main import run as run_command
from samebits.replay.verify import lines
from tests.verify_trials.forgery import edit_evaluation
from tests.verify_trials.runs import alone, prepare_process, train_in, train_until, verified


@pytest.mark.parametrize("name", ["steps.bin", "weights.safetensors"])
def test_a_recorded_file_that_is_missing_is_a_finding(run: Path, name: str) -> None:
    (run / name).unlink()
    verdict = verified(run)
    assert not verdict.is_verified
    assert any(text.startswith(f"{name} is missing") for text in verdict.mismatches)
    if name == "steps.bin":
        assert "equal weights where a segment ends" in "\n".join(lines(verdict))


@pytest.mark.parametrize("command", ["compare", "diff"])
def test_contradicting_settings(honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(honest, run)
    shutil.copytree(honest, other)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 7"))
    run_command([command, str(other), str(run)])
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line.startswith("altered")]
    assert len(lines) == 1
    assert "config.yaml: seed is 7, recorded 0" in lines[0]


@pytest.mark.parametrize(
    ("typed", "is_equal"),
    [
        ("epochs: 4\noptim: {lr: 5e-2, betas: [9e-1, 0.999]}\ncheckpoint: {every: 4 steps}\n", True),
        ("optim: {lr: 0.05}\nreport: {tensorboard: false}\n", True),
        ("epochs: 5\n", False),
        ("optim: {schedule: constant}\n", False),
        ("unheard: 1\n", False),
    ],
)
def test_typed_settings_are_compared_by_meaning(run: Path, typed: str, *, is_equal: bool) -> None:
    (run / "config.diff.yaml").write_text(typed)
    found = [text for text in verified(run, steps=(0, 1)).mismatches if text.startswith("config.diff.yaml")]
    assert (found == []) == is_equal


@pytest.mark.skipif(sys.platform != "linux", reason="holes in files")
@pytest.mark.parametrize("name", ["weights.safetensors", "steps.bin"])
def test_a_sparse_file_of_40_gigabytes_is_a_finding_at_once(run: Path, name: str) -> None:
    with (run / name).open("wb") as file:
        file.truncate(40 * 1024**3)
    began = time.monotonic()
    assert any(text.startswith(name) for text in verified(run, steps=(0, 1)).mismatches)
    assert time.monotonic() - began < 20


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
