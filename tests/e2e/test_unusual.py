"""Unusual models, datasets and commands."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.runs import (
    LONG_S,
    ROOT,
    TINY,
    communicate_all,
    own_port,
    records,
    result,
    running,
    samebits,
    start,
    wait_until,
    weights,
)

pytestmark = pytest.mark.full

UNUSUAL = ROOT / "tests" / "e2e" / "unusual_recipe.py"


@pytest.mark.parametrize(
    "kind",
    [
        "mask", "torch-split",
        *(pytest.param(kind, marks=pytest.mark.lab) for kind in ("gaps", "conv3d", "numpy-split")),
    ],
)  # fmt: skip
def test_the_same_bits_in_training_and_the_same_samples_in_eval(tmp_path: Path, kind: str) -> None:
    for procs in (1, 2):
        folder = tmp_path / str(procs)
        samebits("train", UNUSUAL, f"data.kind={kind}", "--procs", procs, "--run-dir", folder, cwd=tmp_path)
    assert weights(tmp_path / "1") == weights(tmp_path / "2")
    figures = json.loads(samebits("eval", tmp_path / "1", "--json", cwd=tmp_path).stdout)
    assert figures == result(tmp_path / "1")["metrics"]


def test_batch_norm_over_one_sample_is_refused_before_the_first_step(tmp_path: Path) -> None:
    done = samebits("train", UNUSUAL, "data.num_samples=49", cwd=tmp_path, code=2)
    assert "micro-batch of one sample" in done.stderr
    assert "49 samples, global_batch=24" in done.stderr
    assert "global_batch=25" in done.stderr
    samebits("train", UNUSUAL, "data.num_samples=49", "global_batch=25", cwd=tmp_path)


def test_the_command_that_a_stopped_run_prints_resumes_it(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    slow = ["data.slow_s=0.2", f"data.slow_while={tmp_path}/slow"]  # it is not over before it is stopped
    settings = [*slow, "data.num_samples=301", "report.every_steps=1"]
    with running("train", TINY, *settings, "--procs", 2, "--run-dir", "mine", cwd=tmp_path) as process:
        wait_until(lambda: len(records(tmp_path / "mine", "train")) >= 3)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 130
    (tmp_path / "slow").unlink()
    (command,) = re.findall(r"^ +samebits (train .*--resume auto)$", output, flags=re.MULTILINE)
    samebits(*shlex.split(command), cwd=tmp_path)
    samebits("train", TINY, *settings, "--procs", 1, "--run-dir", "whole", cwd=tmp_path)
    assert weights(tmp_path / "mine") == weights(tmp_path / "whole")


def test_ranks_with_other_models_are_named(tmp_path: Path) -> None:
    init = f"tcp://127.0.0.1:{own_port()}"
    terminals = [
        start("train", TINY, f"model.width={6 + rank}", "--run-dir", tmp_path / "run", "--init", init, "--rank", rank,
              "--world-size", 2, cwd=tmp_path)
        for rank in (0, 1)
    ]  # fmt: skip
    errors = [said for _, said in communicate_all(terminals)]
    assert [terminal.returncode for terminal in terminals] == [4, 4], errors
    for text in errors:
        assert "rank 1 differs from rank 0" in text
        assert "setting model.width: 7 on rank 1, 6 on rank 0" in text


def test_resume_names_what_it_needs(tmp_path: Path) -> None:
    assert "--run-dir" in samebits("train", TINY, "--resume", "auto", cwd=tmp_path, code=2).stderr
    assert "is not a checkpoint" in samebits("train", TINY, "--resume", "atuo", cwd=tmp_path, code=2).stderr
    samebits("train", TINY, "epochs=1", "--procs", 1, "--run-dir", "run", cwd=tmp_path)
    text = samebits("train", TINY, "epochs=1", "--resume", "run", cwd=tmp_path, code=2).stderr
    assert "--run-dir run --resume auto" in text
    assert not (tmp_path / "runs").exists()


def test_a_restart_by_torchrun_does_not_begin_another_run(tmp_path: Path) -> None:
    variables = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port()),
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1",
    }  # fmt: skip
    done = samebits("train", TINY, cwd=tmp_path, code=4, **variables)
    assert "restart 1" in done.stderr
    assert "--run-dir" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_paths_in_a_run_folder_hold_from_anywhere(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    samebits("train", "digits", "epochs=1", "data.root=here", "--run-dir", "run", cwd=tmp_path / "work")
    assert str(tmp_path / "work" / "here") in (tmp_path / "work" / "run" / "config.yaml").read_text()


MISTAKES = {
    "loss=lambda outputs, batch: F.cross_entropy(outputs, batch.targets)": "not a dict of named terms",
    "loss=lambda outputs, batch: {'a': F.cross_entropy(outputs, batch.targets, reduction='none')}": "not one number",
    "train_data=lambda: TensorDataset(torch.zeros(9, 27))": "DatasetSamples",
    "train_data=DatasetSamples(part(True))": "train_data=lambda: ...",
    "monitor=('f1', 'max')": "f1",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_answered_in_words(tmp_path: Path, mistake: str) -> None:
    name = mistake.partition("=")[0]
    lines = UNUSUAL.read_text().splitlines()
    lines = [f"        {mistake}," if line.startswith(f"        {name}=") else line for line in lines]
    if name == "monitor":
        lines.insert(-1, f"        {mistake},")
    (tmp_path / "mine.py").write_text("\n".join(lines))
    done = samebits("train", "mine.py", "epochs=1", "--procs", 1, cwd=tmp_path, code=2)
    assert MISTAKES[mistake] in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_training_set_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    for procs in (1, 2):
        done = samebits("train", UNUSUAL, "data.num_samples=0", "--procs", procs, cwd=tmp_path, code=3)
        assert "the training set is empty" in done.stderr
    assert not list((tmp_path / "runs").iterdir())
