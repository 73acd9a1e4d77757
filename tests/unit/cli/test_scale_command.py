"""How `samebits scale` ends, where what it measures does not come to its end."""

from typing import Any

import pytest

from samebits.cli.main import run
from samebits.errors import LaunchError
from samebits.launch import forkserver, start


@pytest.mark.parametrize("code", [130, 143, 1])
def test_a_signal_ends_it_with_the_signals_code_and_only_a_fault_is_reported(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launched(*_: Any) -> int:
        return code

    monkeypatch.setattr(start, "launch_here", launched)
    monkeypatch.setattr(forkserver, "prepare", lambda *_: None)
    arguments = ["scale", "digits", "--procs", "1,2", "--compare", "exact"]
    if code == 143:
        with pytest.raises(SystemExit) as stop:
            run(arguments)
        assert stop.value.code == code
    else:
        assert run(arguments) == (LaunchError.exit_code if code == 1 else code)
    said = capsys.readouterr()
    assert ("exact on 1 process could not be measured" in said.err) == (code == 1)
    assert said.err.strip() == "" or code == 1
    announced, *load = said.out.splitlines()
    assert announced == "2 measurements of 20 steps, each in new processes, 10 s or more each"
    assert all(line.startswith("other programs use ") for line in load)  # on a busy machine
