"""The settings of a run are resolved once: editing the user's YAML file afterwards changes nothing."""

import json
import signal
from pathlib import Path

import pytest

from samebits.engine.run_spec import RunSpec, recipe_of
from samebits.recipes.catalog import command_arguments, find
from tests.faults.faults import SLOW, job
from tests.runs import TINY, samebits, weights

YAML = (
    "recipe: mnist\nepochs: 3\nmodel: {name: tutorial}\noptim: {lr: 0.01, schedule: multi_step, milestones: [1, 2]}\n"
)


def test_a_specification_is_equal_after_its_way_through_json(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(YAML)
    found = find(str(file))
    loaded = found.load(["seed=7"])
    spec = RunSpec("my", loaded.config, loaded.diff, tmp_path / "run", "never", is_restart=False, started_at=1.5)
    assert recipe_of(spec.to_json()) == "mnist"
    assert RunSpec.from_json(spec.to_json(), found.config_class) == spec


@pytest.mark.parametrize("root", ["a b", "2024", "~x", "null", "日本 'ö\"", "a: b #c"])
def test_the_arguments_of_a_run_give_its_settings_without_the_yaml_file(tmp_path: Path, root: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(YAML + "data:\n  root: " + json.dumps(root) + "\n")
    found = find(str(file))
    loaded = found.load(["seed=7"])
    file.unlink()
    source, *overrides = command_arguments(found, loaded)
    again = find(source)
    assert again.load(overrides) == loaded


@pytest.mark.full
def test_an_edited_yaml_file_does_not_change_a_run_that_restarts(undisturbed: str, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(f"recipe: {TINY}\n")
    samebits("trust", TINY, cwd=tmp_path)
    with job(tmp_path, *SLOW, "--procs", 2, "--max-restarts", 1, source=file) as running:
        running.wait_for_step(4)
        file.write_text(f"recipe: {TINY}\nseed: 99\nno_such_setting: 1\n")
        running.workers()[0].send_signal(signal.SIGKILL)
        code, said = running.ended()
    assert code == 0, said
    assert "restart 1 of 1" in said
    assert weights(running.run) == undisturbed
