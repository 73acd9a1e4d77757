"""A run that starts from another run's checkpoint has the folder that it would have if it had trained all steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samebits.cluster.signals import StopSignal
from samebits.cluster.world import alone
from samebits.config.load import load
from samebits.engine.run import run
from samebits.engine.run_spec import RunSpec
from samebits.provenance.statement import read_statement
from samebits.recipes.catalog import find
from samebits.sweeps.handover import hand_over, is_at
from samebits.verify.files import open_run
from tests.runs import TINY, chain, records, result, weights

SPE = 5  # steps per epoch: 101 samples in batches of 24
MONITOR = ("top1", "max")
COMMON = ["device=cpu", "epochs=4", "checkpoint.keep=9", "report.tensorboard=false", "loader.num_workers=0"]


def _loaded(*settings: str) -> Any:
    recipe = find(str(TINY))
    return load(recipe.config_class, recipe.layers, [*COMMON, *settings])


def _train(folder: Path, *settings: str, stop_after: int | None = None) -> Path:
    loaded = _loaded(*settings)
    spec = RunSpec("tiny", loaded.config, loaded.diff, folder, "auto", is_restart=False, started_at=0.0,
                   stop_after=stop_after)  # fmt: skip
    with StopSignal() as stop:
        assert run(spec, find(str(TINY)), alone("cpu"), stop) == 0
    return folder


def _same(first: Path, second: Path) -> None:
    assert (weights(first), chain(first)) == (weights(second), chain(second))
    assert result(first)["best"] == result(second)["best"]
    assert records(first, "eval") == records(second, "eval")


STEPS = ["optim.schedule=multi_step", "optim.milestones=[2]"]


def test_a_run_from_another_runs_checkpoint_equals_one_that_trained_all_steps(tmp_path: Path) -> None:
    prefix = _train(tmp_path / "prefix", *STEPS, "optim.gamma=0.5", stop_after=2 * SPE)
    assert not (prefix / "result.json").exists()
    assert is_at(prefix, 2 * SPE, _loaded(*STEPS).config, SPE)
    settings = [*STEPS, "optim.gamma=0.1"]
    trial = tmp_path / "trial"
    assert hand_over(prefix, trial, _loaded(*settings), SPE, MONITOR) == 2 * SPE
    before = {path: path.stat().st_mtime_ns for path in prefix.rglob("*") if path.is_file()}
    _same(_train(trial, *settings), _train(tmp_path / "alone", *settings))
    assert result(trial)["root"] == result(tmp_path / "alone")["root"]
    assert {path: path.stat().st_mtime_ns for path in prefix.rglob("*") if path.is_file()} == before
    found = open_run(trial, _loaded(*settings).config)
    assert found.log.is_whole
    assert found.mismatches == []
    read_statement(trial / "provenance.json")
    stated = json.loads((trial / "provenance.json").read_text())["predicate"]["runDetails"]["byproducts"][1]
    assert (stated["name"], stated["uri"]) == (f"first {2 * SPE} steps", f"prefix/checkpoints/step-{2 * SPE:06}")


BY_LOSS = ["stop_early.metric=loss", "stop_early.better=min"]


@pytest.mark.parametrize(
    "settings",
    [
        ["max_steps=7"],
        pytest.param([*BY_LOSS, "stop_early.patience=1"], marks=pytest.mark.full),
        pytest.param(["epochs=1"], marks=pytest.mark.full),
        pytest.param([*BY_LOSS, "stop_early.patience=2"], marks=pytest.mark.full),
    ],
)
def test_a_run_that_ends_earlier_or_by_another_rule_equals_one_of_its_own(tmp_path: Path, settings: list[str]) -> None:
    """With such a small learning rate, evaluations are soon not better than those before."""
    slow = ["optim.lr=1e-9", *settings]
    donor = _train(tmp_path / "donor", "optim.lr=1e-9", stop_after=7 if "max_steps=7" in settings else None)
    trial = tmp_path / "trial"
    assert hand_over(donor, trial, _loaded(*slow), SPE, MONITOR) is not None
    _same(_train(trial, *slow), _train(tmp_path / "alone", *slow))
    assert open_run(trial, _loaded(*slow).config).mismatches == []


def test_steps_with_other_learning_rates_are_not_taken_over(tmp_path: Path) -> None:
    donor = _train(tmp_path / "donor", *STEPS, "optim.gamma=0.5", stop_after=12)
    found = hand_over(donor, tmp_path / "later", _loaded(*STEPS, "optim.gamma=0.1"), SPE, MONITOR)
    assert found == 10  # the checkpoint of the last equal step
    assert hand_over(donor, tmp_path / "none", _loaded(*STEPS, "optim.lr=0.2"), SPE, MONITOR) is None
    assert not (tmp_path / "none").exists()
    (donor / "steps.bin").unlink()
    assert hand_over(donor, tmp_path / "none", _loaded(*STEPS), SPE, MONITOR) is None


@pytest.mark.full
def test_a_folder_that_was_filled_in_part_is_filled_again(tmp_path: Path) -> None:
    donor = _train(tmp_path / "donor", *STEPS, stop_after=2 * SPE)
    trial = tmp_path / "trial"
    hand_over(donor, trial, _loaded(*STEPS), SPE, MONITOR)
    (trial / "config.yaml").unlink()
    (trial / "metrics.jsonl").unlink()
    assert hand_over(donor, trial, _loaded(*STEPS), SPE, MONITOR) == 2 * SPE
    _same(_train(trial, *STEPS), _train(tmp_path / "alone", *STEPS))
