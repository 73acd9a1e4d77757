"""An honest run, and what commands print."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run of the tiny recipe, trained once in this process; tests copy it before they change it."""
    from tests.verify_trials.runs import prepare_process, train  # late: most unit tests need no torch

    folder = tmp_path_factory.mktemp("honest") / "run"
    prepare_process()
    train(folder)
    return folder


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in this process, and returns what it prints: its errors if the exit code is not to be 0."""
    from samebits.cli.main import run

    def run_command(words: list[str], code: int = 0) -> str:
        assert run(words) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run_command
