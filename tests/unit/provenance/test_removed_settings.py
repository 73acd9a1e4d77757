"""Run folders of versions with settings that were removed since: read, resumed and verified, or refused by name."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from samebits.config.document import mapping_layer
from samebits.config.load import REMOVED, load, names_of, without_removed
from samebits.config.schema import RunConfig, Settings
from samebits.engine import opening
from samebits.errors import ConfigError
from samebits.provenance import identity
from samebits.provenance.identity import differing, plain_settings
from samebits.recipes.catalog import find
from tests.verify_trials.runs import alone, train, train_until, verified

pytestmark = pytest.mark.usefixtures("honest")
NAMES = sorted(REMOVED)
OF_RECIPES = ("data.cache", "data.cache_gb", "data.encoding", "data.on_error", "decode.beam_width")
OTHER: dict[str, object] = {
    "cluster.load_balancing": True, "compress": "bf16", "data.cache": "decoded", "data.cache_gb": 20.0,
    "data.encoding": "gb18030", "data.on_error": "skip", "decode.beam_width": 8, "mode": "fast",
    "parallel": "fsdp", "report.peak_tflops": 312.0, "watch.recheck": "1/50",
}  # fmt: skip


class Data(Settings):
    root: str | None = None


class Decode(Settings):
    turns: bool = True


class Recipe(RunConfig):
    data: Data = Data()
    decode: Decode = Decode()


def nested(settings: dict[str, object]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[key] = value
    return found


@contextmanager
def earlier_version() -> Iterator[None]:
    """Runs are written with the settings of an earlier version."""
    known = identity.plain_settings

    def earlier(config: RunConfig) -> dict[str, Any]:
        settings = known(config)
        recorded = {**REMOVED, "parallel": "fsdp"}  # it changed no result
        for name, value in nested({name: value for name, value in recorded.items() if name not in OF_RECIPES}).items():
            settings[name] = {**settings[name], **value} if isinstance(value, dict) else value
        return settings

    with (
        patch.object(identity, "plain_settings", earlier),
        patch.object(opening, "plain_settings", earlier),
    ):
        yield


def test_a_run_of_an_earlier_version_is_read_and_verified(printed: Callable[..., str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with earlier_version():
        train(run)
    for file in (run / "config.yaml", *run.glob("checkpoints/*/state.json")):
        assert all(
            name.rpartition(".")[2] in file.read_text(encoding="utf-8") for name in REMOVED if name not in OF_RECIPES
        )
    shutil.copytree(run, tmp_path / "copy")
    assert verified(run).is_verified
    assert "loss" in printed(["eval", str(run)])
    assert "equal" in printed(["compare", str(run), str(tmp_path / "copy")])


def test_a_run_of_an_earlier_version_is_resumed_to_the_weights_that_it_would_have(tmp_path: Path, honest: Path) -> None:
    with earlier_version(), alone() as world:
        assert not train_until(world, tmp_path / "run", stop_at=9)
    train(tmp_path / "run", resume="auto")
    assert (tmp_path / "run" / "weights.safetensors").read_bytes() == (honest / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_setting_with_an_effect_is_refused_by_name(name: str) -> None:
    value = str(OTHER[name]).lower()
    with pytest.raises(ConfigError, match=f"{name}={value} was removed from Samebits") as error:
        load(Recipe, [mapping_layer({"recipe": "x"}, "here")], [f"{name}={value}"])
    assert error.value.slots["given"] == f"on the command line: {name}={value}"
    assert error.value.slots["fix"].startswith("Remove it.")


@pytest.mark.parametrize("name", NAMES)
def test_a_removed_setting_without_an_effect_is_ignored(name: str) -> None:
    assert without_removed(nested({name: REMOVED[name], "seed": 3}))["seed"] == 3
    assert not any(isinstance(each, dict) and each for each in without_removed(nested({name: REMOVED[name]})).values())
    assert without_removed({name: REMOVED[name]}) == {}
    assert without_removed({name: OTHER[name]}, is_typed=True) == {name: OTHER[name]}


def test_a_run_of_classify_with_a_cache_that_was_off_is_the_same_run() -> None:
    spec = find("classify")
    now = spec.load(["data.root=."]).config
    saved = plain_settings(now)
    saved["data"] |= {"cache": None, "cache_gb": 10.0}
    layer = mapping_layer(saved, "config.yaml")
    assert plain_settings(load(type(now), [*spec.layers, layer]).config) == plain_settings(now)
    assert differing(saved, now) == []
    saved["data"]["cache"] = "decoded"
    assert differing(saved, now) == ["data.cache: decoded in the run, not set now"]


def test_a_setting_of_a_recipe_with_the_name_of_a_removed_one_is_kept() -> None:
    class Own(Settings):
        mode: str = "exact"

    assert without_removed({"mode": "exact"}, names_of(Own)) == {"mode": "exact"}


def test_a_setting_in_a_section_of_a_recipe_with_the_name_of_a_removed_one_is_kept() -> None:
    class OwnData(Settings):
        cache: str | None = "somewhere"

    class Own(RunConfig):
        data: OwnData = OwnData()

    assert load(Own, [mapping_layer({"recipe": "x", "data": {"cache": None}}, "here")]).config.data.cache is None
