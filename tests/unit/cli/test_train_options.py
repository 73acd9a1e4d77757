"""What `samebits train` makes of its options, and how a command that asks processes ends early."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samebits.bench.processes import ask
from samebits.cli import start_run
from samebits.cli.main import run
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError, LaunchError
from samebits.launch import start
from samebits.process_range import ProcessRange


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What training was started with."""
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(start_run, "train_command", lambda *arguments: made.append(arguments) or 0)
    return made


def test_a_run_folder_at_home(calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["train", "digits", "--run-dir", "~/a"]) == 0
    assert calls[0][2] == tmp_path / "a"


def test_a_run_folder_with_no_name_is_refused(calls: list[tuple[Any, ...]], printed: Callable[..., str]) -> None:
    assert "--run-dir is empty" in printed(["train", "digits", "--run-dir", ""], ConfigError.exit_code)
    assert calls == []


def test_a_run_folder_that_can_not_be_made_is_refused_before_anything_starts(
    calls: list[tuple[Any, ...]], tmp_path: Path, printed: Callable[..., str]
) -> None:
    (tmp_path / "file").touch()
    said = printed(["train", "digits", "--run-dir", str(tmp_path / "file")], CheckpointError.exit_code)
    assert "Not a directory" in said
    assert "disk space" not in said
    assert calls == []


@pytest.mark.parametrize(
    "command",
    ["doctor --run-dir", "submit digits --run-dir", "data make segment --out", "export RUN --out",
     "predict RUN a.png --draw"],
)  # fmt: skip
def test_a_path_of_a_variable_that_is_not_set_is_refused(command: str, printed: Callable[..., str]) -> None:
    assert f"{command.split()[-1]} is empty" in printed([*command.split(), ""], ConfigError.exit_code)


@pytest.mark.parametrize("code", [130, 143, 1])
def test_a_signal_ends_it_with_the_signals_code_and_only_a_fault_is_reported(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "launch_here", lambda *_: code)
    failure = LaunchError("nothing was measured", fix="Run it alone.")
    with pytest.raises(LaunchError if code == 1 else SystemExit) as end:
        ask(print, (), ProcessRange(2, 2), RunConfig(recipe="digits"), failure)
    if code == 1:
        assert end.value.slots["cause"] == "exit code 1"
    else:
        assert end.value.code == code
