"""What the terminal shows: help, wrapped reports, streams that are full, and a current folder that is gone."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from samebits.cli.app import app
from samebits.cli.main import run
from samebits.cli.options import Commands, print_report
from samebits.errors import ConfigError
from samebits.report.console import Console
from tests.runs import environment

COMMAND = f"{sys.executable} -m samebits"


def shell(line: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=180
    )


SAID = "error: can't write the output: No space left on device\n  fix  Free disk space.\n"


@pytest.mark.parametrize(
    ("line", "code", "said", "unbuffered"),
    [
        ("config digits >/dev/full", 1, SAID, ""),
        ("config digits >/dev/full", 1, SAID, "1"),
        ("config digits >/dev/full 2>&1", 1, "", ""),
        ("config nothing 2>/dev/full", 2, "", ""),
    ],
)
def test_a_full_disk_while_printing_is_a_line(tmp_path: Path, line: str, code: int, said: str, unbuffered: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = shell(f"{COMMAND} {line}", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (code, said)


def test_no_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["train", "digits", "--run-dir", "X"]) == 2
    text = "config error: the current folder no longer exists\n  fix  Change to a folder that exists: cd ~\n"
    assert capsys.readouterr().err == text


class Ascii(io.TextIOWrapper):
    """A terminal whose encoding lacks most characters."""

    def __init__(self, encoding: str = "ascii") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    def text(self) -> str:
        self.seek(0)
        return self.read()


@pytest.mark.parametrize("encoding", ["ascii", "gbk", "latin-1"])
def test_a_console_writes_what_its_encoding_lacks_as_escapes_and_continues(encoding: str) -> None:
    stream = Ascii(encoding)
    console = Console(stream, interactive=False)
    console.say("über 数据 \U0001f600")
    console.say("and on")
    assert stream.text().endswith("and on\n")
    assert "\\U0001f600" in stream.text()


def test_a_console_obeys_no_control_characters_of_others() -> None:
    stream = Ascii("utf-8")
    console = Console(stream, interactive=True)
    console.block("run \x1b[2J\x1b]0;title\x07", {"data": "a\u202eb\x9b31m"})
    console.say("c\x1b[8md\re")
    console.close()
    assert "run \\x1b[2J\\x1b]0;title\\x07" in stream.text()
    assert "a\\u202eb\\x9b31m\n" in stream.text()
    assert "c\\x1b[8md\\re" in stream.text()


def test_an_error_does_nothing_to_a_terminal() -> None:
    error = ConfigError("x\x1b[2Jy is no file", where="a\x9b\u2028b\udcff", fix="1\n2")
    assert str(error) == ("config error: x\\x1b[2Jy is no file\n  where  a\\x9b\\u2028b\\udcff\n  fix    1\n         2")
    assert "\x1b" not in error.line


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "zh_CN.GBK", "PYTHONIOENCODING": "gbk"}])
def test_a_terminal_that_is_not_utf_8_gets_every_text(tmp_path: Path, locale: dict[str, str]) -> None:
    (tmp_path / "größe-😀.yaml").write_text("# 😀 größe\nrecipe: mnist\nseed: 4\n", encoding="utf-8")
    variables = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **locale}
    done = subprocess.run(
        ["sh", "-c", f"{COMMAND} config *.yaml; {COMMAND} train *.yaml x=1"],
        cwd=tmp_path, env=environment(**variables), capture_output=True, timeout=180,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert b"Traceback" not in said
    assert b"seed" in done.stdout
    assert b"x is not a setting" in done.stderr


def test_a_file_that_ends_too_early_is_not_taken_for_ctrl_c(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torn.gz").write_bytes(gzip.compress(b"text")[:-6])

    def read(*arguments: object, **settings: object) -> None:
        gzip.decompress((tmp_path / "torn.gz").read_bytes())

    monkeypatch.setattr("samebits.recipes.catalog.load", read)
    with pytest.raises(EOFError):
        run(["train", "digits"])


def test_what_a_program_reads_is_json_whatever_the_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    from samebits.cli.options import json_text

    value = {"größe": "数\x9b\u202e\udcff😀"}
    for encoding in ("ascii", "gbk", "utf-8"):
        monkeypatch.setattr("sys.stdout", Ascii(encoding))
        text = json_text(value)
        assert json.loads(text) == value
        text.encode(encoding)
        assert "\x9b" not in text


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


def test_help_names_arguments_and_no_types_of_python() -> None:
    commands = typer.main.get_command(app)
    assert isinstance(commands, Commands)
    every = dict(commands.commands)
    every |= commands.commands["data"].commands
    for name, command in every.items():
        text = command.get_help(command.context_class(command, info_name=name, terminal_width=80))
        assert not re.search(r"<(str|path|int|list)\b", text), text


def test_no_summary_is_cut_at_80_columns() -> None:
    commands = typer.main.get_command(app)
    text = commands.get_help(commands.context_class(commands, info_name="samebits", terminal_width=80))
    assert "..." not in text.partition("Commands:")[2]
