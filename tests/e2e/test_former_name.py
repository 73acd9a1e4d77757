"""Run folders of before the package had its name: every command refuses them, and changes nothing."""

import json
from pathlib import Path

import pytest

from samebits.cli.main import run
from tests.runs import TINY, samebits


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run folder whose environment names the package as it was called before."""
    folder = tmp_path_factory.mktemp("former")
    samebits("train", TINY, "epochs=1", "report.tensorboard=false", "--procs", 1, "--run-dir", "run", cwd=folder)
    path = folder / "run" / "environment.json"
    content = json.loads(path.read_text())
    content["packages"]["former"] = content["packages"].pop("samebits")
    path.write_text(json.dumps(content))
    return folder / "run"


@pytest.mark.parametrize(
    "command",
    [
        "train --run-dir RUN --resume auto", "train TINY --run-dir RUN --resume auto",
        "train TINY --resume RUN/checkpoints/last --run-dir new", "eval RUN", "verify RUN", "diff RUN RUN",
        "predict RUN x.png", "export RUN --to safetensors", "compare RUN RUN", "report RUN", "track RUN --to wandb",
    ],
)  # fmt: skip
def test_a_run_of_before_the_name_is_refused(
    former: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(former.parent)
    before = {path: path.read_bytes() for path in former.rglob("*") if path.is_file() and "logs" not in path.parts}
    last = max((former / "checkpoints").glob("step-*"))
    words = [word.replace("RUN/checkpoints/last", str(last)).replace("RUN", str(former)) for word in command.split()]
    assert run([str(TINY) if word == "TINY" else word for word in words]) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "was written by a version from before the package was called samebits" in said
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_of_before_the_name_is_listed_as_unreadable(
    former: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run(["runs", str(former.parent), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["state"], found["reason"]) == (
        "unreadable", "written by a version from before the package was called samebits",
    )  # fmt: skip
