"""What `samebits.train` refuses, and what it leaves behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samebits import api
from samebits.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"procs": 0}, "procs is '0'"), ({"procs": "2:1"}, "procs is '2:1'"), ({"procs": True}, "procs is 'True'"),
        ({"run_dir": ""}, "run_dir is empty"), ({"resume": "auto"}, "without --run-dir"),
        ({"resume": "nowhere"}, "is not a checkpoint"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_before_there_is_a_folder(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        api.train("digits", **asked)
    assert not Path("runs").exists()


def test_a_new_folder_of_a_run_that_never_started_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def failing(command: list[str]) -> tuple[int, DataError]:
        commands.append(command)
        return 3, DataError("there are none")

    monkeypatch.setattr(api, "run_subcommand", failing)
    with pytest.raises(DataError, match="there are none"):
        api.train("digits", {"epochs": np.int64(2)}, procs=2)
    assert "epochs=2" in commands[0]
    assert not list(Path("runs").iterdir())
    Path("mine").mkdir()
    with pytest.raises(DataError):
        api.train("digits", run_dir="mine")
    assert Path("mine").exists()
