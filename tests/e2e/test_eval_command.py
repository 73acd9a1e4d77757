"""Evaluations: of several validation sets, in processes of another launcher, and of sharded runs."""

import json
import shutil
from pathlib import Path

import pytest

import samebits as package
from tests.runs import TINY, TORCHRUN, python, records, result, samebits, weights

RECIPE = f"""
import dataclasses
import sys

sys.path.insert(0, {str(TINY.parent)!r})
import tiny_recipe
from tiny_recipe import PRESET, Config, Pictures


def build(config):
    return dataclasses.replace(tiny_recipe.build(config), eval_sets={{"night": lambda: Pictures(20)}})
"""

SETTINGS = ("max_steps=6", "epochs=9", "eval_every=3 steps")


def test_each_set_has_its_own_metrics_equal_on_two_processes_and_in_an_evaluation_by_one(tmp_path: Path) -> None:
    (tmp_path / "two_sets.py").write_text(RECIPE)
    early = ["stop_early.metric=night.loss", "stop_early.patience=9"]
    text = samebits("train", "two_sets.py", *SETTINGS, *early, "--procs", 2, "--run-dir", "run", cwd=tmp_path).stdout
    assert "night (20 samples)  loss " in text
    run = tmp_path / "run"
    found = result(run)["metrics"]
    assert {"loss", "top1", "night.loss", "night.top1"} <= found.keys()
    assert found["night.top1"] != found["top1"]
    assert [record["night.loss"] for record in records(run, "eval")][-1] == found["night.loss"]
    assert package.evaluate(run) == found
    samebits("train", TINY, *SETTINGS, "--procs", 1, "--run-dir", "one_set", cwd=tmp_path)
    assert weights(tmp_path / "one_set") == weights(run)  # a further set changes no bit of training


@pytest.mark.full
def test_eval_under_torchrun_prints_once_and_the_same_as_alone(tiny: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny, tmp_path / "run")
    done = python(*TORCHRUN, 2, "-m", "samebits", "eval", run, "--json", cwd=tmp_path)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [result(run)["metrics"]]
