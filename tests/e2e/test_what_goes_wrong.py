"""Faults end with an error message and an exit code, or are repaired, and nothing is lost."""

import json
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from samebits.cli.main import run
from samebits.data.loader import lost_reader
from samebits.data.order import Order
from tests.runs import LONG_S, TINY, records, result, running, samebits, wait_until, weights
from tests.warm_forkserver import WAITING

BAD = ["data.bad_sample=40", "report.every_steps=1"]


def bad_step(folder: Path) -> int:
    """The step in which the sample that is not a number comes up first."""
    (report,) = folder.glob("nonfinite-*.json")
    return json.loads(report.read_text())["step"]


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_micro_batch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = samebits("train", TINY, *BAD, "checkpoint.every=1 steps", "--procs", 3, "--run-dir", folder,
                    cwd=tmp_path, code=6)  # fmt: skip
    step = bad_step(folder)
    report = json.loads((folder / f"nonfinite-{step}.json").read_text())
    assert 40 in report["samples"]
    assert (
        f"loss is not finite at step {step} on rank {report['rank']}, micro-batch {report['micro_batch']}"
        in done.stderr
    )
    named = re.findall(r"(rank \d+) \(host \S+ pid \d+\)", done.stderr)
    assert named == [f"rank {report['rank']}"]  # not also the rank whose error arrived first
    assert "gradient of" in done.stderr
    assert "stop (watch.nonfinite=stop)" in done.stderr
    assert f"checkpoint of step {step} is whole" in done.stderr or step == 0
    assert done.stderr.count("training error") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_step_is_skipped_on_all_ranks_where_that_is_asked_for(tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "three"]
    for folder, num_procs in zip(runs, (1, 3), strict=True):
        samebits("train", TINY, *BAD, "watch.nonfinite=skip", "--procs", num_procs, "--run-dir", folder, cwd=tmp_path)
        assert len(result(folder)["skipped_steps"]) == 2  # once an epoch
    assert weights(runs[0]) == weights(runs[1])


@pytest.mark.full
def test_rolling_back_does_not_help_against_a_bad_sample_and_the_run_reports_it(tmp_path: Path) -> None:
    # A seed with which the bad sample is not in the first step: there must be a checkpoint to go back to.
    orders = (Order(num_samples=101, global_batch=24, micro_batch=4, seed=seed) for seed in range(100))
    order = next(order for order in orders if 40 not in order.indices(0, np.arange(24)))
    settings = [*BAD, "watch.nonfinite=rollback", "checkpoint.every=1 steps", f"seed={order.seed}"]
    done = samebits("train", TINY, *settings, "--procs", 2, "--run-dir", tmp_path / "run", cwd=tmp_path, code=6)
    assert "rollback (watch.nonfinite=rollback)" in done.stdout
    assert "rolling back did not help" in done.stderr


@pytest.mark.full
def test_a_run_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train = ("train", TINY, "data.slow_s=0.2", "epochs=1000", "--procs", 1, "--run-dir", folder)
    with running(*train, cwd=tmp_path) as process:
        wait_until(lambda: (folder / "metrics.jsonl").exists())
        done = samebits(*train, "--resume", "auto", cwd=tmp_path, code=5)
    assert f"run folder {folder} is in use" in done.stderr
    assert f"process {process.pid}" in done.stderr


def test_a_run_is_not_written_over(tiny: Path, tmp_path: Path) -> None:
    before = weights(tiny)
    done = samebits("train", TINY, "--procs", 1, "--run-dir", tiny, cwd=tmp_path, code=5)
    assert "already holds a run" in done.stderr
    assert "--resume auto" in done.stderr
    assert weights(tiny) == before


@pytest.mark.full
def test_a_run_does_not_resume_with_other_settings(tiny: Path, tmp_path: Path) -> None:
    done = samebits("train", TINY, "optim.lr=0.1", "--run-dir", tiny, "--resume", "auto", cwd=tmp_path, code=2)
    assert "optim.lr: 0.05 in the run, 0.1 now" in done.stderr


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_named_by_its_setting(tiny: Path, tmp_path: Path) -> None:
    *_, newest = sorted((tiny / "checkpoints").glob("step-*"))
    settings = ["model.width=8", "--procs", 2, "--run-dir", tmp_path / "other", "--resume"]
    done = samebits("train", TINY, *settings, newest, cwd=tmp_path, code=2)
    assert "model.width: 6 in the run, 8 now" in done.stderr
    alone = shutil.copytree(newest, tmp_path / "alone")  # no run folder has its settings
    done = samebits("train", TINY, *settings, alone, cwd=tmp_path, code=2)
    assert "model.width: 6 in the run, 8 now" in done.stderr


@pytest.mark.full
def test_a_run_does_not_resume_with_more_samples_or_fewer(tmp_path: Path) -> None:
    recipe = tmp_path / "grown.py"
    text = TINY.read_text().replace("return len(self.labels)", "return min(len(self.labels), int(os.environ['MOST']))")
    recipe.write_text(text)
    command = ["train", recipe, "epochs=1", "--procs", 1, "--run-dir", tmp_path / "run"]
    samebits(*command, cwd=tmp_path, MOST="90")
    before = weights(tmp_path / "run")
    done = samebits(*command, "--resume", "auto", cwd=tmp_path, code=3, MOST="101")
    assert "the training set has 101 samples, and had 90 when the run started" in done.stderr
    assert weights(tmp_path / "run") == before


@pytest.mark.full
@pytest.mark.parametrize("procs", [1, 2, 3])
def test_a_fork_server_that_is_killed_while_processes_start_is_named(tmp_path: Path, procs: int) -> None:
    """As the kernel does in a small container."""

    def server() -> psutil.Process | None:
        with suppress(psutil.Error):
            found = psutil.Process(process.pid).children()
            return next((each for each in found if any("forkserver" in word for word in each.cmdline())), None)
        return None

    with running("train", TINY, "--procs", procs, "--run-dir", tmp_path / "run", cwd=tmp_path) as process:
        wait_until(lambda: server() is not None or process.poll() is not None)
        if (found := server()) is not None:
            found.kill()
        _, errors = process.communicate(timeout=LONG_S)
    if process.returncode:  # it may have done its work already
        assert process.returncode == 4, errors
        assert "launch error: " in errors
        assert "Traceback" not in errors


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_report_of_a_killed_worker_is_found_below_other_errors(depth: int) -> None:
    error: Exception = RuntimeError("DataLoader worker (pid(s) 7) is killed by signal: Killed. ")
    for _ in range(depth):
        other = ConnectionResetError(104, "Connection reset by peer")
        other.__context__ = error
        error = other
    lost = lost_reader(error)
    assert lost.what == "DataLoader worker (pid 7) is killed by signal: Killed"
    assert lost_reader(ConnectionResetError(104, "Connection reset by peer")) is None


@pytest.mark.full
def test_a_killed_dataloader_worker_is_named_and_the_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "slow").touch()
    slow = ["data.slow_s=0.2", f"data.slow_while={tmp_path}/slow"]  # there are other readers when it evaluates
    settings = [*slow, "loader.num_workers=1", "checkpoint.every=2 steps", "report.every_steps=1"]
    command = ["train", TINY, *settings, "data.num_samples=401", "--procs", 1, "--run-dir", folder]
    with running(*command, cwd=tmp_path) as process:
        wait_until(lambda: len(records(folder, "train")) >= 3)
        (reader,) = (child for child in psutil.Process(process.pid).children() if child.name() != WAITING)
        reader.kill()
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 3, errors
    assert f"data error: DataLoader worker (pid {reader.pid}) exited unexpectedly" in errors
    assert "Traceback" not in errors
    (tmp_path / "slow").unlink()
    samebits(*command, "--resume", "auto", cwd=tmp_path)


@pytest.mark.full
def test_a_full_disk_ends_the_run_and_leaves_the_older_checkpoint_whole(small_disk: Path, tmp_path: Path) -> None:
    settings = ["model.width=64", "data.num_samples=401", "checkpoint.every=1 steps", "checkpoint.keep=1000"]
    folder = small_disk / "run"
    run = ["train", TINY, *settings, "report.tensorboard=false", "--procs", 2, "--run-dir", folder]
    done = samebits(*run, cwd=tmp_path, code=5)
    assert "can't write" in done.stderr
    assert "No space left on device" in done.stderr
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk], check=True)
    samebits(*run, "--resume", "auto", cwd=tmp_path)
    samebits(*run[:-1], tmp_path / "roomy", cwd=tmp_path)
    assert weights(folder) == weights(tmp_path / "roomy")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["train", "minst"], 2, "mnist"),
        (["train", "digits", "epohcs=3"], 2, "epochs"),
        (["train", "digits", "epochs=many"], 2, "epochs=many"),
        (["train", "digits", "mode=quick"], 2, "exact"),
        (["train", "digits", "device=cuda"], 4, "device=cpu"),
        (["train", "mnist", "data.root=/nowhere", "data.download=false"], 3, "/nowhere"),
        (["train", "digits", "--rank", "1"], 4, "--init"),
        (["eval", "nowhere"], 5, "nowhere"),
        (["predict", "nowhere", "x.png"], 5, "nowhere"),
    ],
)
def test_a_mistake_is_answered_in_a_few_lines(
    tmp_path: Path, arguments: list[str], code: int, text: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU, so this is no mistake")
    monkeypatch.chdir(tmp_path)
    for name in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # a command sets them for the processes that it starts
    assert run([*arguments, *(["--procs", "2"] if arguments[0] == "train" and code != 4 else [])]) == code
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 12
    assert not list(tmp_path.glob("runs/*/checkpoints/step-*"))
