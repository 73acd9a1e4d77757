"""Errors that are detectable before processes start are raised before torch is imported, which takes seconds."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import samebits
from tests.runs import LONG_S, SAMEBITS, environment
from tests.runs import samebits as run_samebits

IMPORTED = re.compile(r"^import time:.*\|\s+(\S+)$", re.MULTILINE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two epochs of digits with a checkpoint after the first, as far as a start looks into it."""
    from samebits.config.document import to_yaml
    from samebits.recipes.catalog import find

    found = find("digits")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000023"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "run" / "run.lock").touch()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(found.load(["epochs=2"]).config.model_dump(mode="json")))
    return tmp_path / "run"


def refused(command: str, folder: Path, **more: str) -> tuple[int, str]:
    """Return the exit code and the error of a command that must not import torch."""
    done = subprocess.run(
        [SAMEBITS[0], "-X", "importtime", *SAMEBITS[1:], *command.split()],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    modules = set(IMPORTED.findall(done.stderr))
    assert "samebits.cli.main" in modules, "the list of imported modules can be read"
    assert "torch" not in modules
    return done.returncode, "\n".join(line for line in done.stderr.splitlines() if "import time:" not in line)


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("train classify", 3, "samebits data make classify"),
        ("train classify data.train=/nope data.eval=/nope", 3, "data.train is '/nope', which does not exist"),
        ("train text data.root=/nope", 3, "data.root is '/nope', which does not exist"),
        ("train pose data.name=coco data.root=/nope", 3, "data.root is '/nope', which does not exist"),
        ("train digits optim.leanring_rate=0.1", 2, "Use optim.lr "),
        ("train classify data.root=. model.name=resnet19", 2, "Use model.name=resnet18."),
    ],
)
def test_data_and_names_are_checked_before_it(tmp_path: Path, command: str, code: int, text: str) -> None:
    returned, error = refused(f"{command} --procs 2", tmp_path)
    assert (returned, text in error) == (code, True), error
    assert not any(tmp_path.iterdir())


def test_a_gpu_that_is_hidden_is_missed_before_torch(tmp_path: Path) -> None:
    code, error = refused("train digits device=cuda", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert code == 4
    assert "device is cuda, but there is no CUDA device" in error
    assert "fix    Set device=cpu" in error
    assert not any(tmp_path.iterdir())


def test_a_resume_with_other_epochs_is_refused_before_torch(run: Path, tmp_path: Path) -> None:
    code, error = refused(f"train --run-dir {run} --resume auto epochs=4", tmp_path)
    assert code == 2
    assert "epochs: 2 in the run, 4 now" in error
    code, error = refused(f"train digits epochs=4 --resume {run}/checkpoints/step-000023", tmp_path)
    assert code == 2
    assert "epochs: 2 in the run, 4 now" in error


def test_a_resume_with_more_epochs_shows_how_to_train_further(tmp_path: Path) -> None:
    run = tmp_path / "flowers-0001"
    (run / "checkpoints" / "step-000001").mkdir(parents=True)
    (run / "config.yaml").write_text(f"recipe: classify\nepochs: 3\ndata: {{root: {tmp_path}}}\n")
    (run / "run.lock").touch()
    (run / "weights.safetensors").touch()
    (run / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")
    code, error = refused(f"train --run-dir {run} --resume auto epochs=5", tmp_path)
    assert code == 2
    command = f"samebits train {run}/config.yaml --run-dir NEW epochs=5 model.weights={run}/weights.safetensors"
    assert command in " ".join(error.split())


@pytest.mark.parametrize("length", ["epochs=4", "max_steps=60"])
def test_a_resume_with_another_length_shows_the_command_of_a_new_run(run: Path, tmp_path: Path, length: str) -> None:
    _, error = refused(f"train --run-dir {run} --resume auto {length}", tmp_path)
    assert f"samebits train {run}/config.yaml --run-dir NEW {length}" in error
    assert "model.weights" not in error  # digits does not take weights


def test_the_same_settings_are_not_refused(run: Path) -> None:
    from samebits.cli.start_run import check_before_start
    from samebits.recipes.catalog import find

    found = find(str(run / "config.yaml"))
    config = found.load().config
    assert isinstance(config, samebits.RunConfig)
    check_before_start(config, run, "auto")
    check_before_start(config, None, str(run / "checkpoints" / "step-000023"))


def test_an_image_folder_in_place_of_a_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "photos" / "roses").mkdir(parents=True)
    error = run_samebits("eval", "photos", cwd=tmp_path, code=5).stderr
    assert "photos is not a run folder: it has no config.yaml" in error
    assert "samebits eval RUN data.root=photos" in error


def test_samebits_train_raises_the_error_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(samebits.DataError) as caught:
        samebits.train("classify", {"data.root": "/no\nfolder"}, procs=2)
    assert caught.value.what == "data.root is '/no\\nfolder', which does not exist"
    assert caught.value.slots["fix"] == "Set data.root to an existing file or folder."
    assert set(caught.value.slots) == {"where", "fix"}
    assert "SAMEBITS_ERROR_FILE" not in os.environ
