import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command

import samebits
import samebits.version
from samebits.cli import start_run
from samebits.cli.app import app
from samebits.cli.main import run
from samebits.config.given import flat
from samebits.config.load import Loaded
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError
from samebits.launch.start import LaunchOptions
from samebits.recipes.catalog import RecipeSpec

COMMAND = [sys.executable, "-m", "samebits"]


class FakeApi(SimpleNamespace):
    """Stands for `train_command`: records its calls."""

    def __init__(self) -> None:
        super().__init__(calls=[], error=None, code=0)

    def train_command(self, found: RecipeSpec, loaded: Loaded[RunConfig], *given: Any) -> int:
        *args, stop_after = given
        assert stop_after is None
        self.calls.append((found.name, [f"{name}={value}" for name, value in flat(loaded.diff).items()], *args))
        if self.error:
            raise self.error
        return int(self.code)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setattr(start_run, "train_command", fake.train_command)
    monkeypatch.delenv("SAMEBITS_DEBUG", raising=False)
    return fake


def lines_fit(text: str) -> bool:
    return all(len(line) <= 80 for line in text.splitlines())


def test_train_hands_over_what_was_typed(api: FakeApi) -> None:
    api.code = 7
    first = ["train", "digits", "epochs=2", "--procs", "3", "optim.lr=0.5", "--run-dir", "runs/a"]
    joined = ["--init", "tcp://h:1", "--rank", "1", "--world-size", "4", "--local-rank", "1"]
    assert run([*first, "--resume", "auto", "--max-restarts", "2", *joined]) == 7
    asked = LaunchOptions("3", None, None, None, "tcp://h:1", 1, 4, 2)
    assert api.calls == [("digits", ["epochs=2", "optim.lr=0.5"], Path("runs/a"), "auto", asked)]


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ([], LaunchOptions()),
        (["--local_rank=0"], LaunchOptions()),  # as old launchers give it
        (["--nnodes", "2:3", "--nproc-per-node", "2", "--rdzv-endpoint", "h:1", "--rdzv-id", "a"],
         LaunchOptions("2", "2:3", "h:1", "a")),
    ],
)  # fmt: skip
def test_torchruns_names_are_other_names_for_ours(api: FakeApi, typed: list[str], options: LaunchOptions) -> None:
    assert run(["train", "digits", *typed]) == 0
    assert api.calls == [("digits", [], None, "never", options)]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["--node-rank", "1", "--master", "h:5"], "--rdzv-endpoint h:5"),
        (["--node-rank=1", "--master-addr=h", "--master-port=5"], "--rdzv-endpoint h:5"),
        (["--master-port", "5", "--master-addr", "::1", "--node-rank", "0"], "--rdzv-endpoint '[::1]:5'"),
        (["--master", "[::1]:5", "--node-rank", "0"], "--rdzv-endpoint '[::1]:5'"),
        (["--node-rank", "0", "--master", "h"], "--rdzv-endpoint h:29400"),
        (["--node-rank", "0"], "--rdzv-endpoint HOST:29400"),
    ],
)
def test_a_removed_option_of_node_ranks_names_the_line_to_use_instead(
    api: FakeApi, typed: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["train", "digits", "optim.lr=0.5", "--nodes", "2"]
    assert run([*rest[:2], *typed, *rest[2:]]) == ConfigError.exit_code
    said = " ".join(capsys.readouterr().err.split())
    assert "is not an option any more" in said
    assert f"Type the same line on all machines: samebits {' '.join(rest)} {line}" in said
    assert api.calls == []
    assert run([*rest, *shlex.split(line)]) == 0  # as the error says


def test_the_line_to_use_instead_keeps_an_endpoint_that_was_typed(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    for endpoint in (["--rdzv-endpoint", "h:5"], ["--rdzv-endpoint=h:5"]):
        rest = ["train", "digits", "--nodes", "2", *endpoint]
        assert run([*rest, "--node-rank", "1"]) == ConfigError.exit_code
        said = " ".join(capsys.readouterr().err.split())
        assert said.endswith(f"Type the same line on all machines: samebits {' '.join(rest)}")
    assert api.calls == []


def test_an_option_that_never_existed_is_answered_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "digits", "--node-number", "1"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_a_wrong_setting_is_refused_before_anything_starts(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "digits", "optim.lrr=0.1"]) == ConfigError.exit_code
    captured = capsys.readouterr()
    assert api.calls == []
    assert captured.out == ""
    assert captured.err.startswith("config error: optim.lrr is not a setting\n")
    assert "on the command line: optim.lrr=0.1" in captured.err
    assert lines_fit(captured.err)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointError("weights.safetensors is torn", where="runs/a"), CheckpointError.exit_code,
         "checkpoint error: weights.safetensors is torn\n  where  runs/a\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)  # fmt: skip
def test_an_error_gives_its_own_exit_code_and_no_traceback(
    api: FakeApi, printed: Callable[..., str], error: BaseException, code: int, said: str
) -> None:
    api.error = error
    assert printed(["train", "digits"], code) == said


@pytest.mark.parametrize("by_option", [True, False])
def test_debug_shows_the_traceback(
    api: FakeApi, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch, by_option: bool
) -> None:
    monkeypatch.setenv("SAMEBITS_DEBUG", "" if by_option else "1")
    api.error = CheckpointError("torn")
    text = printed(["train", "digits", *(["--debug"] if by_option else [])], CheckpointError.exit_code)
    assert "Traceback" in text
    assert "train_command" in text


def test_a_fault_of_ours_is_raised(api: FakeApi) -> None:
    api.error = ZeroDivisionError("oh")
    with pytest.raises(ZeroDivisionError):
        run(["train", "digits"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "no recipe was named"),
        (["train", "--resume", "auto"], "--run-dir runs/NAME-0001 --resume auto"),
        (["train", "--procs", "3"], "samebits train digits"),
        (["train", "--run-dir", "dmeo", "--resume", "auto"], "fix  Check the path."),
        (["verify", "dmeo", "--sample", "200%"], "up to 100%"),
        (["train", "digits", "--proc", "3"], "No such option"),
        (["train", "digits", "--procs", "0"], "--procs is '0'"),
        (["train", "digits", "--procs", "two"], "--procs is 'two'"),
        (["train", "digits", "--procs", "1000000000"], "--procs is '1000000000'"),
        (["train", "digits", "--max-restarts", "-1"], "Invalid value for '--max-restarts'"),
        (["predict"], "Missing argument"),
        (["predict", "runs/a"], "samebits predict runs/a FILE"),
        (["predict", "unknown.jpg"], "samebits predict RUN unknown.jpg"),
        (["predict", "my cat.PNG", "b.png"], "samebits predict RUN 'my cat.PNG' b.png"),
        (["--foo"], "No such option"),
    ],
)
def test_a_command_typer_refuses(api: FakeApi, printed: Callable[..., str], arguments: list[str], text: str) -> None:
    assert text in printed(arguments, 2)
    assert api.calls == []


def test_a_setting_with_dashes_is_refused_with_the_right_form(api: FakeApi, printed: Callable[..., str]) -> None:
    for words, form in (
        (["--epochs", "7"], "without dashes: epochs=7"),
        (["--lr=0.5"], "without dashes: optim.lr=0.5"),
        (["--batch-size", "64"], "without dashes: global_batch=64"),
        (["--max-epochs"], "without dashes: epochs=N"),
        (["--zzz"], "without dashes: epochs=3 optim.lr=0.1"),
        (["--gpus", "1"], "one process each: --procs 1"),
        (["--num-processes=4"], "one process each: --procs 4"),
    ):
        text = printed(["train", "digits", *words], 2)
        assert form in text
        assert "Possible options" not in text or words == ["--zzz"]


def test_config_without_a_name_lists_what_there_is(printed: Callable[..., str]) -> None:
    text = printed(["config"])
    assert lines_fit(text)
    for word in ("mnist", "digits", "tutorial"):
        assert word in text


@pytest.mark.parametrize("name", ["mnist", "digits", "mnist/tutorial"])
def test_config_shows_every_setting_within_80_columns(printed: Callable[..., str], name: str) -> None:
    from samebits.config.describe import settings
    from samebits.recipes.catalog import find

    text = printed(["config", name])
    assert lines_fit(text)
    keys = [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")]
    assert {setting.key for setting in settings(find(name).config_class)} - {"recipe"} <= set(keys)
    assert "\N{NO-BREAK SPACE}" not in text
    assert "*" not in text


def test_config_marks_what_differs_from_the_preset(printed: Callable[..., str]) -> None:
    text = printed(["config", "digits", "optim.lr=0.5"])
    assert "*0.5" in text
    assert "* differs from the preset" in text


def test_config_shows_a_recipe_with_a_setting_that_is_needed(
    tmp_path: Path, printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "needy.py").write_text(
        "from pydantic import Field\nfrom samebits.config.schema import RunConfig\n"
        "class Config(RunConfig):\n    root: str = Field(description='where it is')\n"
        "def build(config): ...\n"
    )
    try:
        assert "(required)" in printed(["config", "needy.py"])
        assert "root is missing" in printed(["train", "needy.py"], 2)
    finally:
        sys.modules.pop("needy", None)


def test_the_schema_is_json_with_the_presets_values(printed: Callable[..., str]) -> None:
    tree = json.loads(printed(["config", "digits", "--schema"]))
    assert tree["properties"]["data"]["properties"]["name"]["default"] == "digits"
    assert tree["required"] == ["recipe"]


def shell(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "SAMEBITS_DEBUG"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, **options)


def test_the_module_is_the_command() -> None:
    done = shell("--version")
    assert (done.returncode, done.stdout) == (0, f"samebits {samebits.version.__version__}\n")


@pytest.mark.parametrize("words", ["", "--help", "train --help", "eval --help", "predict --help", "config --help"])
def test_help_fits_into_80_columns(words: str) -> None:
    done = shell(*words.split())
    assert not words or done.returncode == 0
    assert lines_fit(done.stdout + done.stderr)
    assert "Usage: samebits" in done.stdout + done.stderr


def test_help_mistakes_and_tables_do_not_import_torch() -> None:
    for arguments in (
        ["--help"],
        ["config", "mnist"],
        ["config"],
        ["train", "mnist", "optim.lrr=1"],
        ["train", "mnst"],
        ["verify", "no_such_run"],
    ):
        code = f"import sys\nfrom samebits.cli.main import run\nrun({arguments})\nprint('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "False", arguments


def test_help_and_mistakes_are_answered_at_once() -> None:
    # The bars are 0.3 s and 1 s, in the processor's time: other tests may run, and an answer waits for nothing else.
    # On a slow or busy processor, all take longer alike: the bars are those of one that imports typer in 0.08 s.
    commands = {
        "typer": [sys.executable, "-c", "import typer"],
        "help": [*COMMAND, "--help"],
        "mistake": [*COMMAND, "train", "mnist", "optim.lrr=1"],
    }
    best_s = dict.fromkeys(commands, 1e9)
    for _ in range(3):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            best_s[name] = min(best_s[name], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    slowness = max(1.0, best_s["typer"] / 0.08)
    assert 0 < best_s["help"] < 0.3 * slowness, best_s
    assert 0 < best_s["mistake"] < 1.0 * slowness, best_s


@pytest.mark.parametrize("arguments", [["config"], ["config", "mnist", "--schema"]])
def test_a_reader_that_went_away_is_no_error(arguments: list[str]) -> None:
    # Little output breaks when it is flushed at the end, much of it in the midst of the command.
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*COMMAND, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_has_color_on_a_terminal_only() -> None:
    assert "\x1b" not in shell("train", "nothing").stderr
    for variables, colored in (({}, True), ({"NO_COLOR": "1"}, False)):
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | variables
        main, side = pty.openpty()
        subprocess.run([*COMMAND, "train", "nothing"], stderr=side, stdout=side, env=environment)
        os.close(side)
        text = os.read(main, 10_000).decode()
        os.close(main)
        assert ("\x1b[1;31mconfig error:\x1b[0m" in text) == colored


def test_ctrl_c_in_a_recipe_that_is_being_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [*COMMAND, "config", str(tmp_path / "slow.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 130
    assert errors.strip() == ""


def test_the_help_lists_each_command_once_below_one_of_five_headings(printed: Callable[..., str]) -> None:
    text = printed(["--help"])
    assert re.findall(r"^(\w+):$", text, re.MULTILINE)[1:] == ["Train", "Look", "Check", "Share", "Cluster"]
    listed = re.findall(r"^  ([a-z]+) +\S", text.partition("\nTrain:")[2], re.MULTILINE)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert sorted(listed) == sorted(name for name, command in commands.items() if not command.hidden)
    assert lines_fit(text)
