"""Which trials a sweep has: values of the command line, their places on a machine, and the array of Slurm jobs."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run
from samebits.config.load import load
from samebits.cores import core_ids, num_cores
from samebits.errors import CheckpointError, ConfigError
from samebits.recipes.catalog import find
from samebits.sweeps.runner import make_slots
from samebits.sweeps.state_file import Sweep, combinations, parse_grid, read_sweep


def _config(*settings: str) -> Any:
    found = find("digits")
    return load(
        found.config_class, found.layers, ["epochs=4", "optim.schedule=constant", "optim.warmup_epochs=0", *settings]
    ).config


def test_values_are_split_outside_of_brackets_and_quotes_and_ranges_are_expanded() -> None:
    axes = parse_grid(["optim.lr=0.1,3e-2", "seed=0:3", "optim.milestones=[1,2],[3]", "data.root='a,b',c", "x=0:6:2,9"])
    assert [axis.values for axis in axes] == [
        ("0.1", "3e-2"), ("0", "1", "2"), ("[1,2]", "[3]"), ("'a,b'", "c"), ("0", "2", "4", "9"),
    ]  # fmt: skip
    assert combinations(axes[:2])[:3] == [
        ["optim.lr=0.1", "seed=0"],
        ["optim.lr=0.1", "seed=1"],
        ["optim.lr=0.1", "seed=2"],
    ]


@pytest.mark.parametrize("text", ["seed", "seed=", "seed=1,", "seed=1,1", "seed=3:3", "=1", "seed=0:100000"])
def test_values_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_grid([text])


def test_a_grid_becomes_an_array_of_jobs_with_a_run_folder_for_each_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a sweep"
    grid = ["--grid", "seed=0:3", "optim.lr=0.1", "--time", "1:00:00", "--dry-run", "--run-dir", str(folder)]
    assert run(["submit", "digits", "epochs=3", *grid]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --array=0-2\n" in text
    for name in ("srun", "sbatch"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "{name}"; printf " <%s>" "$@"; echo\n', encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    assert "<train> <mnist/digits> <epochs=3> <seed=1> <optim.lr=0.1>" in line
    assert f"<--run-dir> <{folder}/trial-0002> <--resume> <auto>" in line
    assert not folder.exists()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run(["submit", "digits", *(word for word in grid if word != "--dry-run")]) == 0
    assert f"samebits sweep {shlex.quote(str(folder))} --show" in capsys.readouterr().out
    assert len(read_sweep(folder).trials) == 3


def test_a_sweep_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    sweep = Sweep(["mnist/digits"], ["seed"], [["seed=0"]])
    sweep.write(tmp_path)
    assert read_sweep(tmp_path) == sweep


_SWEEP = {"format": 1, "arguments": ["digits"], "keys": ["seed"], "trials": [["seed=0"]]}


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{}", "of another version"),
        ('{"format": 1}', "arguments"),
        ("[", "Expecting value"),
        ('{"format": 2}', "of another version"),
        ("[]", "of another version"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps(_SWEEP | {"trials": []}), "at least 1 item"),
        (json.dumps(_SWEEP | {"trials": ["seed=0"]}), "valid list"),
        (json.dumps(_SWEEP | {"trials": [[0]]}), "valid string"),
        (json.dumps(_SWEEP | {"arguments": []}), "at least 1 item"),
        (json.dumps(_SWEEP | {"keys": None}), "valid list"),
        (json.dumps(_SWEEP | {"search": {"space": ["optim.lr=0:1"]}}), "it is of a search"),
    ],
)
def test_a_damaged_file_of_a_sweep_is_refused_with_the_cause(tmp_path: Path, content: str, cause: str) -> None:
    (tmp_path / "sweep.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not the file of a sweep") as error:
        read_sweep(tmp_path)
    assert cause in str(error.value.slots["cause"])


def test_a_grid_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    old = _SWEEP | {"metric": "", "better": "max", "search": None, "outcomes": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(old), encoding="utf-8")
    assert read_sweep(tmp_path) == Sweep(["digits"], ["seed"], [["seed=0"]])


def test_gpus_and_cores_are_divided_among_trials_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [slot.gpus for slot in make_slots(None, 2, _config("device=auto"))] == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="need 6 GPUs"):
        make_slots(3, 2, _config("device=auto"))
    assert [slot.gpus for slot in make_slots(3, 2, _config("device=cpu"))] == [None] * 3
    assert make_slots(1, 1, _config("device=cpu"))[0].cores == frozenset()
    slots = make_slots(num_cores(), 1, _config("device=cpu"))
    assert frozenset().union(*(slot.cores for slot in slots)) in (core_ids(), frozenset())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["digits"], "a sweep needs values to try"),
        (["digits", "--grid", "optim.lrr=1,2"], "optim.lrr"),
        (
            ["digits", "epochs=2", "--grid", "seed=0:2", "epochs=1,2"],
            "epochs is given both as epochs=2 and with values",
        ),
        (["digits", "--grid", "seed=0:2", "optim.lr=1,-1"], "optim.lr"),
        (["digits", "--grid", "seed=0,1", "seed=2,3"], "--grid names seed twice"),
        (["digits", "--show"], "is not the folder of a sweep"),
    ],
)
def test_a_wrong_command_is_refused_before_a_folder_is_made(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["sweep", *arguments]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
