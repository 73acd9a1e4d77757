"""The commands of the README, as a user runs them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from tests.runs import (
    LONG_S,
    ROOT,
    TINY,
    TORCHRUN,
    communicate_all,
    environment,
    kill_session,
    own_port,
    processes_with,
    python,
    records,
    result,
    samebits,
    start,
    wait_until,
    weights,
)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    samebits("train", "digits", "epochs=3", cwd=folder)
    return folder / "runs" / "digits-0001"


def test_the_run_folder_holds_all_of_a_run(digits: Path) -> None:
    there = {str(path.relative_to(digits)) for path in digits.rglob("*")}
    for name in (
        "config.yaml", "config.diff.yaml", "environment.json", "metrics.jsonl", "result.json", "weights.safetensors",
        "checkpoints/step-000069/manifest.json", "logs/rank-0.log", "pictures/confusion.png",
        "pictures/loss.svg", "pictures/metric.svg",
        "pictures/train_samples.png",
    ):  # fmt: skip
        assert name in there
    assert any(name.startswith("tensorboard/events") for name in there)
    assert yaml.safe_load((digits / "config.diff.yaml").read_text()) == {"epochs": 3}
    assert json.loads((digits / "environment.json").read_text())["packages"]["torch"]


@pytest.mark.full
def test_eval_needs_only_the_run_folder_and_is_the_same_at_any_world_size(digits: Path, tmp_path: Path) -> None:
    for procs in (1, 3):
        figures = json.loads(samebits("eval", digits, "--json", "--procs", procs, cwd=tmp_path).stdout)
        assert figures == result(digits)["metrics"]


@pytest.mark.full
def test_eval_of_the_best_checkpoint(digits: Path, tmp_path: Path) -> None:
    figures = json.loads(samebits("eval", digits, "--checkpoint", "best", "--json", cwd=tmp_path).stdout)
    assert figures["top1"] == result(digits)["best"]["value"]


@pytest.mark.full
def test_predict_needs_only_the_run_folder(digits: Path, tmp_path: Path) -> None:
    import sklearn.datasets

    pictures, labels = sklearn.datasets.load_digits(return_X_y=True)
    right = 0
    files = []
    for place in range(10):
        file = tmp_path / f"{place}.png"
        Image.fromarray((pictures[place].reshape(8, 8) * 15.9).astype(np.uint8)).save(file)
        files.append(file)
    lines = samebits("predict", digits, *files, "--json", cwd=tmp_path).stdout.splitlines()
    right = sum(json.loads(line)["class"] == label for line, label in zip(lines, labels, strict=False))
    assert len(lines) == 10
    assert right >= 9
    assert "class" in samebits("predict", digits, files[0], cwd=tmp_path).stdout


@pytest.mark.full
def test_predict_names_the_file_that_is_not_an_image(digits: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(tmp_path / "line.png")
    done = samebits("predict", digits, tmp_path / "notes.txt", tmp_path / "line.png", cwd=tmp_path, code=3)
    assert "notes.txt" in done.stderr
    assert "line.png" in done.stdout  # the others are answered


@pytest.mark.full
def test_a_yaml_file_with_overrides(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("recipe: digits\nepochs: 5\noptim: {lr: 0.2}\n")
    samebits("train", "my.yaml", "optim.lr=0.05", "epochs=1", cwd=tmp_path)
    folder = tmp_path / "runs" / "my-0001"
    assert result(folder)["steps"] == 23
    assert "lr: 0.05" in (folder / "config.yaml").read_text()


@pytest.mark.full
def test_under_torchrun(tiny: Path, tmp_path: Path) -> None:
    done = python(*TORCHRUN, 2, "-m", "samebits", "train", TINY, "--run-dir", tmp_path / "run", cwd=tmp_path)
    assert weights(tmp_path / "run") == weights(tiny)
    assert done.stdout.count("done in") == 1  # only rank 0 prints
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()


@pytest.mark.full
def test_in_two_terminals(tiny: Path, tmp_path: Path) -> None:
    world = ["--init", f"tcp://127.0.0.1:{own_port()}", "--world-size", 2]
    terminals = [
        start("train", TINY, "--run-dir", tmp_path / "run", *world, "--rank", rank, cwd=tmp_path) for rank in (1, 0)
    ]
    outputs = communicate_all(terminals)
    assert [terminal.returncode for terminal in terminals] == [0, 0], outputs
    (said, _), _ = outputs  # of rank 1
    assert re.fullmatch(
        r"rank 1 of 2 joined at .*; rank 0 prints the progress, this rank logs to .*run/logs/rank-1.log",
        said.splitlines()[0],
    )
    assert said.splitlines()[-1] == "rank 1 of 2: done"
    assert weights(tmp_path / "run") == weights(tiny)


@pytest.mark.full
def test_from_python(tmp_path: Path) -> None:
    program = (
        "import samebits\n"
        "run = samebits.train('digits', {'epochs': 1, 'optim.lr': 0.05}, procs=2)\n"
        "assert samebits.evaluate(run.folder) == run.metrics\n"
        "print(run.weights_sha256, run.metrics['top1'])\n"
        "try:\n"
        "    samebits.train('digits', {'epohcs': 1})\n"
        "except samebits.SamebitsError as error:\n"
        "    print(type(error).__name__)\n"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.stdout.splitlines()[-2].startswith(weights(tmp_path / "runs" / "digits-0001"))
    assert done.stdout.splitlines()[-1] == "ConfigError"


@pytest.mark.full
def test_ctrl_c_in_a_script_saves_and_ends_without_a_traceback(tmp_path: Path) -> None:
    program = (
        "import samebits\n"
        "try:\n"
        "    settings = {'data.slow_s': 0.05, 'epochs': 1000}\n"
        f"    samebits.train({str(TINY)!r}, settings, procs=1, run_dir={str(tmp_path / 'run')!r})\n"
        "except KeyboardInterrupt:\n"
        "    print('caught')\n"
        "    raise\n"
    )
    script = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_until(lambda: records(tmp_path / "run", "train"))
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        out, errors = script.communicate(timeout=LONG_S)
    finally:
        kill_session(script)
        for pid in processes_with(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
    assert (script.returncode, errors) == (130, "")
    assert "and saved; resume with" in out
    assert out.splitlines()[-1] == "caught"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.full
def test_training_called_from_a_process_that_is_killed_saves_and_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = "{'data.slow_s': 0.05, 'epochs': 1000}"
    call = f"samebits.train({str(TINY)!r}, {settings}, procs=2, run_dir={str(folder)!r})"
    script = subprocess.Popen([sys.executable, "-c", f"import samebits; {call}"], cwd=tmp_path, env=environment(),
                              start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    below: list[psutil.Process] = []
    try:
        wait_until(lambda: records(folder, "train"))
        below = psutil.Process(script.pid).children(recursive=True)
        script.kill()  # as a notebook's kernel is when it is restarted
        script.wait()
        assert not psutil.wait_procs(below, timeout=LONG_S)[1]
    finally:
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert list((folder / "checkpoints").glob("step-*"))
    assert not (folder / "result.json").exists()


@pytest.mark.full
def test_a_loop_of_ones_own_gives_the_same_bits_at_any_world_size(tmp_path: Path) -> None:
    said = []
    for number, launcher in enumerate(([], [*TORCHRUN, 3])):
        folder = tmp_path / str(number)
        folder.mkdir()
        said.append(python(*launcher, ROOT / "examples" / "own_loop.py", cwd=folder).stdout)
    assert said[0] == said[1]
    assert float(said[0].split("top1': ")[1].split("}")[0]) > 0.9


@pytest.mark.full
def test_a_recipe_around_a_torch_dataset_gives_the_same_bits_at_any_world_size(tmp_path: Path) -> None:
    example = ROOT / "examples" / "own_recipe.py"
    for number, settings in enumerate((["--procs", 1], ["--procs", 3, "loader.num_workers=2"])):
        done = samebits("train", example, "epochs=1", *settings, "--run-dir", tmp_path / str(number), cwd=tmp_path)
        assert "samebits predict" not in done.stdout  # this recipe can't
    assert weights(tmp_path / "0") == weights(tmp_path / "1")
