"""A run is resumed with the settings that it started with."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from samebits.config.schema import RunConfig, Settings
from samebits.errors import CheckpointError, ConfigError
from samebits.provenance.identity import check_came_from, check_same_run, plain_settings
from samebits.storage.run_folder import RunFolder

CONFIG = RunConfig(recipe="test", global_batch=16, micro_batch=8)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a checkpoint."""
    folder = RunFolder(tmp_path)
    (folder.checkpoints / "step-000002").mkdir(parents=True)
    (folder.checkpoints / "step-000002" / "manifest.json").touch()
    _write(folder, CONFIG.model_dump(mode="json"))
    return folder


def _write(folder: RunFolder, settings: dict[str, Any]) -> None:
    folder.config.write_text(yaml.safe_dump(settings))


def test_a_run_resumes_with_its_own_settings_and_with_others_that_change_no_result(folder: RunFolder) -> None:
    check_same_run(folder, CONFIG, "auto")
    check_same_run(folder, CONFIG.model_copy(update={"eval_batch": 7, "device": "cpu"}), "auto")


@pytest.mark.parametrize("recipe", ["mnist", "classify", "elsewhere/other.py"])
def test_a_run_of_another_recipe_is_named_instead_of_thirty_settings(folder: RunFolder, recipe: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_same_run(folder, CONFIG.model_copy(update={"recipe": recipe, "epochs": 3}), "auto")
    assert caught.value.what == f"{folder.path} is a run of test, and not of {Path(recipe).name}"
    assert caught.value.slots["fix"].endswith(f"  samebits train --run-dir {folder.path} --resume auto")


class WithWeights(Settings):
    weights: Path = Field(default=Path("w.pth"), description="a file")


class WithPath(RunConfig):
    model: WithWeights = Field(default=WithWeights(), description="a section")


def test_a_relative_path_is_that_of_the_run(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = WithPath(recipe="test")
    _write(folder, plain_settings(config))
    assert plain_settings(config)["model"]["weights"] == str(tmp_path / "w.pth")
    check_same_run(folder, config, "auto")
    with pytest.raises(ConfigError, match="other settings"):
        check_same_run(folder, WithPath(recipe="test", model={"weights": "v.pth"}), "auto")


def test_a_checkpoint_of_another_run_resumes_with_that_run_s_settings(folder: RunFolder, tmp_path: Path) -> None:
    check_came_from(folder, CONFIG)
    check_came_from(folder, CONFIG.model_copy(update={"eval_batch": 7}))
    check_came_from(RunFolder(tmp_path / "no run"), CONFIG.model_copy(update={"seed": 5}))
    with pytest.raises(ConfigError, match="has other settings, so this run can't resume") as caught:
        check_came_from(folder, CONFIG.model_copy(update={"seed": 5}))
    assert caught.value.slots["given"] == "seed: 0 in the run, 5 now"


def test_settings_that_change_the_result_are_named_with_both_values(folder: RunFolder) -> None:
    with pytest.raises(ConfigError) as caught:
        check_same_run(folder, CONFIG.model_copy(update={"seed": 5, "epochs": 3}), "auto")
    assert caught.value.slots["given"] == "epochs: 10 in the run, 3 now\nseed: 0 in the run, 5 now"
    assert "learning rate follows from epochs" in caught.value.slots["fix"]


def test_a_setting_that_came_later_had_its_default_in_older_runs(folder: RunFolder) -> None:
    settings = CONFIG.model_dump(mode="json")
    del settings["precision"]
    _write(folder, settings)
    check_same_run(folder, CONFIG, "auto")
    with pytest.raises(ConfigError) as caught:
        check_same_run(folder, CONFIG.model_copy(update={"precision": "bf16"}), "auto")
    assert caught.value.slots["given"] == "precision: fp32 in the run, bf16 now"


def test_a_setting_that_is_gone_is_named(folder: RunFolder) -> None:
    _write(folder, {**CONFIG.model_dump(mode="json"), "once": 1})
    with pytest.raises(ConfigError) as caught:
        check_same_run(folder, CONFIG, "auto")
    assert caught.value.slots["given"] == "once: 1 in the run, not set now"


def test_a_run_is_not_overwritten_by_a_new_one(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match="already holds a run"):
        check_same_run(folder, CONFIG, "never")
