"""Reports of verify and diff: whole lines in a file, wrapped ones on a terminal."""

import sys

import pytest

from samebits.cli.options import print_report

LINE = "  FAIL     checkpoints/step-000161/weights.safetensors is truncated: 40000 of 286696 bytes"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_report_is_wrapped_on_a_terminal_alone(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    print_report([LINE, "result     different"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "result     different"
    if is_terminal:
        assert lines[1] == " " * 11 + "286696 bytes"
        assert max(map(len, lines)) <= 80
    else:
        assert lines[0] == LINE
