"""Runs that end by max_steps or stop_early, evaluations in steps, and a profile of some steps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import LONG_S, TINY, records, result, running, samebits, wait_until, weights

QUICK = ["report.tensorboard=false"]


def test_max_steps_ends_a_run_in_mid_epoch_and_evaluations_may_count_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["epochs=3", "max_steps=7", "eval_every=2 steps", "report.profile=2:4", "optim.schedule=cosine"]
    output = samebits("train", TINY, *settings, *QUICK, "--run-dir", run, cwd=tmp_path).stdout
    assert "7: 3 epochs of 5, cut by max_steps" in output
    assert result(run)["steps"] == 7
    assert [record["step"] for record in records(run, "eval")] == [2, 4, 6, 7]
    assert records(run, "train")[-1]["lr"] == pytest.approx(0.0)  # the schedule spans these steps
    trace = json.loads((run / "profile" / "trace.json").read_text())
    assert any("conv" in str(event.get("name")) for event in trace["traceEvents"])
    assert "Self CPU" in (run / "profile" / "table.txt").read_text()
    done = samebits("verify", run, "--all", cwd=tmp_path).stdout
    assert "verified   every step of the run" in done


@pytest.mark.full
def test_a_run_stops_early_after_the_same_step_in_any_world_and_is_verified(tmp_path: Path) -> None:
    # No change is an improvement of 10, so the second validation without one ends the run: the third of twenty.
    settings = ["epochs=20", "stop_early.patience=2", "stop_early.min_delta=10", "eval_every=3 steps", *QUICK]
    for procs in (1, 2):
        output = samebits(
            "train", TINY, *settings, "--procs", procs, "--run-dir", tmp_path / f"run-{procs}", cwd=tmp_path
        ).stdout
        assert "training ends: top1 did not improve in 2 validations, larger is better (stop_early)" in output
    assert result(tmp_path / "run-1")["steps"] == 9
    assert weights(tmp_path / "run-1") == weights(tmp_path / "run-2")
    assert result(tmp_path / "run-1")["root"] == result(tmp_path / "run-2")["root"]
    again = samebits("train", TINY, *settings, "--resume", "auto", "--run-dir", tmp_path / "run-1", cwd=tmp_path)
    assert "this run is already complete. To train longer, start a new run:" in again.stdout
    assert f"samebits train {tmp_path}/run-1/config.yaml --run-dir NEW epochs=N" in again.stdout
    assert "verified   every step of the run" in samebits("verify", tmp_path / "run-2", "--all", cwd=tmp_path).stdout


def test_a_run_whose_loss_falls_is_not_stopped_by_it(tmp_path: Path) -> None:
    settings = ["epochs=4", "stop_early.patience=1", "stop_early.metric=loss", *QUICK]
    output = samebits("train", TINY, *settings, "--run-dir", tmp_path / "run", cwd=tmp_path).stdout
    losses = [record["loss"] for record in records(tmp_path / "run", "eval")]
    rises = [number for number in range(1, len(losses)) if losses[number] >= min(losses[:number])]
    assert len(losses) >= 3
    assert rises in ([], [len(losses) - 1])
    assert ("training ends: loss did not improve in 1 validation, smaller is better" in output) == (len(losses) < 4)


def test_a_metric_that_the_validation_lacks_is_named(tmp_path: Path) -> None:
    settings = ["stop_early.patience=2", "stop_early.metric=nope", "max_steps=1", *QUICK]
    done = samebits("train", TINY, *settings, "--run-dir", tmp_path / "run", cwd=tmp_path, code=2)
    assert "the validation has no metric nope" in done.stderr
    assert "stop_early.metric" in done.stderr


def delete(run: Path) -> None:
    while run.exists():  # the run may write a checkpoint into a folder that is being emptied
        shutil.rmtree(run, ignore_errors=True)


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def replace(run: Path) -> None:
    shutil.copytree(run, run.with_name("copy"))
    delete(run)
    run.with_name("copy").rename(run)


@pytest.mark.parametrize("change", [delete, move, replace])
def test_a_run_whose_folder_goes_away_ends_with_the_reason(tmp_path: Path, change: Callable[[Path], None]) -> None:
    run = tmp_path / "run"
    (tmp_path / "slow").touch()
    slow = ["data.slow_s=0.05", f"data.slow_while={tmp_path}/slow", "checkpoint.every=2 steps", "loader.num_workers=0"]
    with running("train", TINY, *slow, *QUICK, "--procs", 1, "--run-dir", run, cwd=tmp_path) as process:
        wait_until(lambda: len(records(run, "train")) >= 3 if run.exists() else False)
        change(run)
        (tmp_path / "slow").unlink()
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 5, errors
    assert f"checkpoint error: run folder {run} was deleted or moved during the run" in errors
    assert "Traceback" not in errors
    assert not (run / "result.json").exists()


@pytest.mark.parametrize("names", [["config.yaml"], ["steps.bin", "environment.json"]])
def test_a_file_that_was_deleted_while_a_run_went_on_is_named_at_its_end(tmp_path: Path, names: list[str]) -> None:
    run = tmp_path / "run"
    (tmp_path / "slow").touch()
    slow = ["data.slow_s=0.05", f"data.slow_while={tmp_path}/slow", "loader.num_workers=0", "report.every_steps=1"]
    with running("train", TINY, *slow, *QUICK, "--procs", 1, "--run-dir", run, cwd=tmp_path) as process:
        wait_until(lambda: len(records(run, "train")) >= 3 if run.exists() else False)
        for name in names:
            (run / name).unlink()
        (tmp_path / "slow").unlink()
        output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    expected = [name for name in ("config.yaml", "environment.json", "metrics.jsonl", "steps.bin") if name in names]
    assert f"warning: {', '.join(expected)} in {run}: deleted during the run" in output + errors
