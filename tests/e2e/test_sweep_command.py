"""`samebits sweep` as users run it: each trial is the run that it would be alone, and a stopped sweep continues."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runs import LONG_S, TINY, chain, processes_with, records, running, samebits, start, wait_until, weights

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]  # each trial is a process that imports torch
COMMON = ["device=cpu", "epochs=4", "report.tensorboard=false", "loader.num_workers=0", "report.every_steps=1"]
STEPS = ["optim.schedule=multi_step", "optim.milestones=[2]"]


def sweep(*arguments: object, cwd: Path) -> str:
    """Run a sweep to its end, and return what it prints."""
    with running("sweep", *arguments, cwd=cwd) as process:
        out, err = process.communicate(timeout=900)
    assert process.returncode == 0, out + err
    return out


def table(folder: Path) -> dict[str, Any]:
    """The trials of a sweep without times."""
    trials = json.loads(samebits("sweep", folder, "--show", "--json", cwd=folder.parent).stdout)["trials"]
    return {trial["trial"]: {name: trial[name] for name in trial if name != "took_s"} for trial in trials}


def test_a_run_stops_after_some_steps_and_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    where = ["cluster.recovery=in_step", "--run-dir", run, "--procs", 2]
    out = samebits("train", TINY, *COMMON, *where, "--stop-after", 10, cwd=tmp_path).stdout
    assert "stopped after step 10 and saved" in out
    assert [record["step"] for record in records(run, "checkpoint")][-1] == 10
    assert [record["step"] for record in records(run, "eval")] == [5, 10]  # after the evaluation that is due
    samebits("train", "--run-dir", run, "--resume", "auto", "--procs", 1, cwd=tmp_path)
    samebits("train", TINY, *COMMON, "--run-dir", alone, "--procs", 1, cwd=tmp_path)
    assert (weights(run), chain(run)) == (weights(alone), chain(alone))


def test_a_sweep_that_is_killed_and_resumed_has_the_same_table(tmp_path: Path) -> None:
    values = ["--grid", "optim.gamma=0.1,0.5,0.9"]
    command = [TINY, *COMMON, *STEPS, "data.slow_s=0.02", *values]
    sweep(*command, "--sweep-dir", "whole", cwd=tmp_path)
    process = start("sweep", *command, "--sweep-dir", "killed", cwd=tmp_path)
    try:
        wait_until(lambda: records(tmp_path / "killed" / "trial-0002", "train"), LONG_S)
    finally:
        process.kill()  # not its trials, which have to save and end
        process.communicate()
    sweep("killed", cwd=tmp_path)
    assert table(tmp_path / "killed") == table(tmp_path / "whole")
    wait_until(lambda: not processes_with(str(tmp_path / "killed")))


def test_ctrl_c_saves_all_trials_and_names_the_command_that_resumes(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    settings = [*COMMON, "data.slow_s=0.3", f"data.slow_while={slow}", "--grid", "seed=0:2", "--sweep-dir", "sweep"]
    with running("sweep", TINY, *settings, "--jobs", 2, cwd=tmp_path) as process:
        trials = [tmp_path / "sweep" / name for name in ("trial-0001", "trial-0002")]
        wait_until(lambda: all(records(trial, "train") for trial in trials), LONG_S)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 130, out + err
    assert "samebits sweep sweep" in out
    slow.unlink()
    assert all((trial / "checkpoints").glob("step-*") for trial in trials)
    sweep("sweep", cwd=tmp_path)
    ended = table(tmp_path / "sweep").values()
    assert {trial["state"] for trial in ended} == {"done"}
    assert len({trial["weights_sha256"] for trial in ended}) == 2  # another seed gives another model


def test_a_trial_has_the_hash_of_the_same_training_alone(tmp_path: Path) -> None:
    grid = [*COMMON, *STEPS, "--grid", "optim.gamma=0.5", "max_steps=14,20"]
    out = sweep(TINY, *grid, "--jobs", "2", "--sweep-dir", "sweep", cwd=tmp_path)
    assert "2 trials, 2 side by side" in out
    found = table(tmp_path / "sweep")
    assert [trial["state"] for trial in found.values()] == ["done"] * 2
    alone = ["optim.gamma=0.5", "max_steps=20", "--run-dir", tmp_path / "alone", "--procs", 2]
    samebits("train", TINY, *COMMON, *STEPS, *alone, cwd=tmp_path)
    assert found["trial-0002"]["weights_sha256"] == weights(tmp_path / "alone")
    samebits("verify", tmp_path / "sweep" / "trial-0002", "--all", cwd=tmp_path)
    samebits("report", tmp_path / "sweep", "--out", tmp_path / "sweep.html", cwd=tmp_path)
    page = (tmp_path / "sweep.html").read_text()
    assert all(trial["weights_sha256"][:8] in page for trial in found.values())
