"""`samebits train`, `eval` and `predict`: what they make of their options, hand over and print."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import samebits.inference
from samebits.bench.processes import ask
from samebits.cli import start_run
from samebits.cli.main import run
from samebits.config.schema import RunConfig
from samebits.errors import CheckpointError, ConfigError, DataError, LaunchError
from samebits.inference import predict
from samebits.inference.trained_model import TrainedModel
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


class FakeTrained(SimpleNamespace):
    """Stands for `samebits.inference.predict`: notes what it is called with."""

    def __init__(self) -> None:
        super().__init__(calls=[], prediction={"class": 7, "probability": 0.99123}, expand=list)

    def evaluate(self, *args: Any, **more: Any) -> dict[str, float]:
        self.calls.append((*args, more))
        return {"top1": 0.98611, "samples": 360.0}

    def predictions(self, *args: Any) -> Any:
        self.calls.append(args)
        for path in args[1]:
            fault = DataError(f"{path} is no picture") if path.suffix == ".txt" else None
            yield predict.Prediction(path, {"error": str(fault)} if fault else self.prediction, fault)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTrained:
    fake = FakeTrained()
    monkeypatch.setitem(sys.modules, "samebits.inference.predict", fake)
    monkeypatch.setattr(samebits.inference, "predict", fake)
    return fake


def test_eval_prints_the_figures(fake: FakeTrained, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "runs/a", "loader.num_workers=2", "--procs", "2", "--checkpoint", "best"]) == 0
    assert fake.calls == [(Path("runs/a"), ["loader.num_workers=2"], 2, "best", {"preset": None})]
    assert capsys.readouterr().out == "top1     0.98611\nsamples  360\n"
    assert run(["eval", "a.pth", "--preset", "digits", "--json"]) == 0
    assert fake.calls[-1] == (Path("a.pth"), [], None, "last", {"preset": "digits"})
    assert json.loads(capsys.readouterr().out) == {"top1": 0.98611, "samples": 360.0}


def test_predict_prints_a_line_for_each_file(fake: FakeTrained, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "runs/a", "a.png", "longer.png", "test.flip=true", "--draw", "out"]) == 0
    subject = TrainedModel(Path("runs/a"), ["test.flip=true"])
    assert fake.calls == [(subject, [Path("a.png"), Path("longer.png")], Path("out"))]
    lines = ["a.png       class 7  probability 99.12%", "longer.png  class 7  probability 99.12%"]
    assert capsys.readouterr().out.splitlines() == lines
    assert run(["predict", "runs/a", "a.png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "a.png", "class": 7, "probability": 0.99123}
    assert run(["predict", "a.pth", "a.png", "--preset", "digits", "--checkpoint", "best"]) == 0
    assert fake.calls[-1][0] == TrainedModel(Path("a.pth"), [], "best", "digits")


def test_predict_continues_after_a_file_that_is_no_image(fake: FakeTrained, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "runs/a", "a.png", "b.txt", "c.png"]) == DataError.exit_code
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()] == ["a.png", "c.png"]
    assert captured.err == "data error: b.txt is no picture\n"
    assert run(["predict", "runs/a", "a.png", "b.txt", "--json"]) == DataError.exit_code
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert answers[1] == {"file": "b.txt", "error": "data error: b.txt is no picture"}


def test_predict_shows_the_likeliest_and_counts_the_rest(fake: FakeTrained, capsys: pytest.CaptureFixture[str]) -> None:
    fake.prediction = {
        "class": "tulips",
        "top": [{"class": "tulips", "probability": 0.9}, {"class": "roses and so on", "probability": 0.05}],
        "people": [{"keypoints": [[1, 2], [3, 4]]}] * 3,
    }
    assert run(["predict", "runs/a", "a.png"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.png  class tulips  people 3",
        "    tulips           90.00%",
        "    roses and so on   5.00%",
    ]
    assert run(["predict", "runs/a", *(f"{place}.png" for place in range(11))]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 11, "for many files a line each"


def test_a_file_s_equals_sign_is_no_setting(fake: FakeTrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").touch()
    assert run(["predict", "runs/a", "lr=0.1", "other=0.1"]) == 0
    assert fake.calls == [(TrainedModel(Path("runs/a"), ["other=0.1"]), [Path("lr=0.1")], None)]


def test_predict_without_a_file_reports_what_is_missing(fake: FakeTrained, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predict", "runs/a", "other=0.1"]) == ConfigError.exit_code
    assert "samebits predict runs/a FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "eval", "predict {} a.png", "export", "verify", "diff {} {}", "push {} new", "compare {} {}", "report",
        "track {} --to mlflow",
    ],
)  # fmt: skip
def test_a_path_that_is_no_run_is_reported_alike_by_all_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/digits-0001").mkdir(parents=True)
    Path("runs/digits-0001/config.yaml").touch()
    for path, problem in {"nowhere": "does not exist", "runs": "is not a run folder: it has no config.yaml"}.items():
        arguments = (command if "{}" in command else f"{command} {{}}").format(path, path)
        assert run(arguments.split()) == 5
        error = f"checkpoint error: {path} {problem}\n  fix  Name a run folder: runs/digits-0001\n"
        assert capsys.readouterr().err == error
