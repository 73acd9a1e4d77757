"""Which runs a sweep has: values of the command line, equal first steps, and the arrays of Slurm jobs."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from samebits.cli.main import run
from samebits.config.load import load
from samebits.cores import core_ids, num_cores
from samebits.errors import ConfigError
from samebits.launch.slurm import BatchJob, batch_script
from samebits.recipes.catalog import find
from samebits.sweeps.batch import array_job, arrays_of
from samebits.sweeps.grid import Axis, SearchInterval, combinations, parse_grid, parse_space
from samebits.sweeps.prefixes import Part, learning_rates, num_steps_of, plan
from samebits.sweeps.slots import combined, make_slots
from samebits.sweeps.state_file import Group, Sweep, read_sweep

SPE = 23
MULTI = "optim.schedule=multi_step"


def _config(*settings: str) -> Any:
    found = find("digits")
    return load(
        found.config_class, found.layers, ["epochs=4", "optim.schedule=constant", "optim.warmup_epochs=0", *settings]
    ).config


def _plan(*trials: list[str]) -> list[tuple[str, str | None, int | None]]:
    parts = plan([_config(*trial) for trial in trials], dict.fromkeys(range(len(trials)), SPE))
    return [(part.name, part.donor, part.stop_after) for part in parts]


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
    assert parse_space(["optim.lr=1e-4:1e-1:log", "model.width=16:64", "optim.name=sgd,adam"]) == [
        SearchInterval("optim.lr", 1e-4, 0.1, True, False), SearchInterval("model.width", 16, 64, False, True),
        Axis("optim.name", ("sgd", "adam")),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["seed", "seed=", "seed=1,", "seed=1,1", "seed=3:3", "=1", "seed=0:100000"])
def test_values_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_grid([text])
    with pytest.raises(ConfigError):
        parse_space([text.replace("0:100000", "2:1")])


def test_trials_are_trained_together_up_to_the_first_step_whose_learning_rate_differs() -> None:
    later = [[MULTI, f"optim.milestones={value}"] for value in ("[1]", "[2]", "[3]")]
    assert _plan(*later) == [
        ("prefix-0001", None, SPE),
        ("prefix-0002", "prefix-0001", 2 * SPE),
        ("trial-0001", "prefix-0001", None),
        ("trial-0002", "prefix-0002", None),
        ("trial-0003", "prefix-0002", None),
    ]
    parts = plan([_config(*trial) for trial in later], dict.fromkeys(range(3), SPE))
    assert num_steps_of(parts, dict.fromkeys(range(3), 4 * SPE)) == (2 * SPE + 3 * SPE + 2 * 2 * SPE, 12 * SPE)


def test_a_shorter_run_is_a_part_of_a_longer_one_if_its_schedule_is() -> None:
    assert _plan(["max_steps=40"], ["max_steps=60"]) == [
        ("prefix-0001", None, 40), ("trial-0001", "prefix-0001", None), ("trial-0002", "prefix-0001", None),
    ]  # fmt: skip
    cosine = "optim.schedule=cosine"  # spans all steps
    assert _plan(["max_steps=40", cosine], ["max_steps=60", cosine]) == [
        ("trial-0001", None, None), ("trial-0002", None, None),
    ]  # fmt: skip


def test_trials_that_differ_only_in_when_they_stop_continue_each_other() -> None:
    assert _plan(["stop_early.patience=null"], ["stop_early.patience=5"], ["stop_early.patience=2"]) == [
        ("trial-0003", None, None), ("trial-0002", "trial-0003", None), ("trial-0001", "trial-0002", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [["seed=1"], ["optim.momentum=0.5"], ["optim.clip_norm=1"], ["global_batch=32"],
                 ["eval_every=2 epochs"], ["mode=fast"], ["optim.lr=0.2"], ["optim.warmup_epochs=1"]],
)  # fmt: skip
def test_every_other_setting_makes_trials_differ_from_the_first_step(settings: list[str]) -> None:
    assert _plan([], settings) == [("trial-0001", None, None), ("trial-0002", None, None)]


def test_the_learning_rates_are_those_that_a_step_computes() -> None:
    config = _config("optim.lr=0.4", "optim.lr_for_batch=256", "global_batch=64", "optim.warmup_epochs=0.5", MULTI,
                     "optim.milestones=[2]")  # fmt: skip
    rates = learning_rates(config, SPE)
    assert len(rates) == 4 * SPE
    assert rates[-1] == config.peak_lr * 0.1
    assert rates[0] < rates[1] < rates[20] == config.peak_lr == 0.1


def test_parts_become_arrays_of_jobs_that_wait_for_what_they_start_from(tmp_path: Path) -> None:
    parts = [Part("prefix-0001", 0, None, 10), Part("trial-0003", 2), Part("trial-0001", 0, "prefix-0001"),
             Part("trial-0002", 1, "prefix-0001")]  # fmt: skip
    arrays = arrays_of(parts)
    assert [([part.name for part in array], after) for array, after in arrays] == [
        (["prefix-0001"], None), (["trial-0003"], None), (["trial-0001", "trial-0002"], 0),
    ]  # fmt: skip
    sweep = Sweep(["mnist/digits", "epochs=3"], ["seed"], [["seed=0"], ["seed=1"], ["seed=2"]])
    folder = tmp_path / "a sweep"
    text = batch_script(array_job(BatchJob([], folder, time="1:00:00"), sweep, arrays[2][0], "17"))
    assert "#SBATCH --dependency=afterok:17\n" in text
    assert "#SBATCH --array=0-1\n" in text
    (folder / "output").mkdir(parents=True)
    for name in ("srun", "python"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "{name}"; printf " <%s>" "$@"; echo\n', encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    python = next(line for line in text.splitlines() if "sweep-part" in line).split()[0]
    text = text.replace(python, "python")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "1"}
    done = subprocess.run(["bash"], input=text, env=environ, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.endswith(f"<sweep-part> <{folder}> <trial-0002>")
    assert f"<train> <mnist/digits> <epochs=3> <seed=1> <--run-dir> <{folder}/trial-0002> <--resume> <auto>" in second
    prefix = batch_script(array_job(BatchJob([], folder), sweep, arrays[0][0], None))
    assert shlex.join(["seed=0", "stop_early.patience=null", "report.trackers=[]", "--stop-after", "10"]) in prefix


def test_a_sweep_is_read_as_it_was_written_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    sweep = Sweep(["mnist/digits"], ["seed"], [["seed=0"]], groups=[Group([0], 23, [])], metric="top1")
    sweep.write(tmp_path)
    assert read_sweep(tmp_path) == sweep
    for content in ("{}", '{"format": 1}', "[", '{"format": 2}'):
        (tmp_path / "sweep.json").write_text(content, encoding="utf-8")
        with pytest.raises(Exception, match="is not the file of a sweep"):
            read_sweep(tmp_path)


def test_gpus_and_cores_are_divided_among_trials_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [slot.gpus for slot in make_slots(None, 2, _config("device=auto"))] == ["4,5", "6,7"]
    assert combined(make_slots(None, 2, _config("device=auto"))).gpus == "4,5,6,7"
    with pytest.raises(ConfigError, match="need 6 GPUs"):
        make_slots(3, 2, _config("device=auto"))
    assert [slot.gpus for slot in make_slots(3, 2, _config("device=cpu"))] == [None] * 3
    assert make_slots(1, 1, _config("device=cpu"))[0].cores == frozenset()
    assert combined(make_slots(num_cores(), 1, _config("device=cpu"))).cores in (core_ids(), frozenset())
    assert combined(make_slots(2, 1, _config("device=cpu"))).gpus is None


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
        (["digits", "--search", "optuna"], "a sweep needs values to try"),
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
