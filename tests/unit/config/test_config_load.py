from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, model_validator

from samebits.config.describe import settings
from samebits.config.document import Layer, mapping_layer, parse, read_layer, to_yaml
from samebits.config.load import _ALIASES, load, preview
from samebits.config.schema import OptimConfig, RunConfig, Settings
from samebits.errors import ConfigError


class DataConfig(Settings):
    root: Path = Field(description="folder with the images")
    names: list[str] = Field(default=[], description="class names")


class Config(RunConfig):
    optim: OptimConfig = Field(default=OptimConfig(lr=0.05), description="the optimizer")
    data: DataConfig = Field(description="which pictures")


PRESET = mapping_layer({"recipe": "shapes", "data": {"root": "pictures"}}, "preset.yaml", is_preset=True)


def fails(*overrides: str, layers: tuple[Layer, ...] = (PRESET,), model: type[RunConfig] = Config) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(model, layers, overrides)
    assert all(len(line) <= 80 for line in str(caught.value).splitlines()), str(caught.value)
    return caught.value


def written(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Layer:
    monkeypatch.chdir(folder)
    (folder / "my.yaml").write_text(text)
    return read_layer(folder / "my.yaml")


def test_the_later_layer_wins_key_by_key() -> None:
    mine = mapping_layer({"epochs": 3, "optim": {"momentum": 0.5}}, "my.yaml")
    config = load(Config, [PRESET, mine], ["epochs=4"]).config
    assert (config.epochs, config.optim.momentum, config.data.root) == (4, 0.5, Path("pictures"))


def test_a_recipes_own_default_of_a_section_stays_when_another_key_of_it_is_set() -> None:
    assert load(Config, [PRESET], ["optim.momentum=0.5"]).config.optim.lr == 0.05


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optim.lr=1e-3", "optim.lr", 0.001), ("optim.lr=1", "optim.lr", 1.0),
        ("optim.betas=[0.8, 0.9]", "optim.betas", (0.8, 0.9)), ("optim={lr: 0.3, name: adam}", "optim.name", "adam"),
        ("optim.clip_norm=null", "optim.clip_norm", None), ("checkpoint.every=5min", "checkpoint.every", "5min"),
        ("data.root=2024", "data.root", Path("2024")), ("data.root=@home/a: #b", "data.root", Path("@home/a: #b")),
        ("data.root='~'", "data.root", Path("~")), ("report.tensorboard=false", "report.tensorboard", False),
        ("data.names=[no, yes]", "data.names", ["no", "yes"]), (" epochs = 3 ", "epochs", 3),
    ],
)  # fmt: skip
def test_an_override_is_read_as_yaml(override: str, path: str, value: object) -> None:
    found: Any = load(Config, [PRESET], [override]).config
    for word in path.split("."):
        found = getattr(found, word)
    assert found == value


def test_the_difference_from_the_preset_is_kept() -> None:
    mine = mapping_layer({"epochs": 3, "seed": 0}, "my.yaml")
    loaded = load(Config, [PRESET, mine], ["optim.lr=0.05", "optim.momentum=0.5", "data.root=elsewhere"])
    assert loaded.diff == {"epochs": 3, "optim": {"momentum": 0.5}, "data": {"root": "elsewhere"}}
    assert load(Config, [PRESET]).diff == {}


def test_the_resolved_config_gives_the_same_config_again() -> None:
    loaded = load(Config, [PRESET], ["optim.schedule=multi_step", "optim.milestones=[1, 2.5]", "optim.lr=1e-5"])
    layer = mapping_layer(parse(to_yaml(loaded.config.model_dump(mode="json")), "config.yaml").values, "config.yaml")
    again = load(Config, [PRESET, layer])
    assert again.config == loaded.config
    assert again.diff == loaded.diff


def test_an_unknown_key_is_named_with_its_place_and_the_nearest() -> None:
    assert str(fails("optim.lrr=0.1")) == (
        "config error: optim.lrr is not a setting\n"
        "  given  on the command line: optim.lrr=0.1\n"
        "  fix    Use optim.lr (float > 0, now 0.05): Peak learning rate for the\n"
        "         global batch.\n"
        "         For all settings: samebits config shapes"
    )


@pytest.mark.parametrize(
    ("text", "what", "line", "fix"),
    [
        ("recipe: x\noptim:\n  momentun: 0.5\n", "optim.momentun is not a setting", 3, "Use optim.momentum ("),
        (
            "epochs: 3\noptimiser:\n  momentum: 0.5\n",
            "optimiser is not a section of the settings",
            2,
            "Use optim (section)",
        ),
        ("seed: 1\noptim: {lr: 0.1,\n  name: x}\n", 'optim.name can\'t be "x"', 3, ""),
    ],
)
def test_a_mistake_in_a_file_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str, line: int, fix: str
) -> None:
    error = fails(layers=(PRESET, written(tmp_path, text, monkeypatch)))
    assert (error.what, error.slots["given"]) == (what, f"my.yaml:{line}")
    assert error.slots["fix"].startswith(fix)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("lr=0.1", "Use optim.lr "), ("learning.lr=0.1", "Use optim.lr "), ("optimizer.lr=0.1", "Use optim (section)"),
        ("epoch=3", "Use epochs "), ("batch_size=3", "Use global_batch "), ("batchsize=3", "Use global_batch "),
        ("optim.leanring_rate=0.1", "Use optim.lr "), ("train.max_epochs=3", "Use epochs "),
        ("data.seeed=3", "Use seed "), ("optim.shedule=cosine", "Use optim.schedule "),
        ("dat.root=x", "Use data (section)"), ("workers=2", "Use loader.num_workers "),
        ("zzz=2", "Correct its name, or remove it.\n"), ("optim.name=sdg", "Use optim.name=sgd."),
        ("optim.name=AdamW", "Use optim.name=adamw."), ("optim.name=adamW", "Use optim.name=adamw."),
        ("precision=BF16", "Use precision=bf16."), ("device=cuda0", "Use device=cuda."),
        ("device=gpu9", "Use an allowed value, such as device=auto."),
        ("epochs=0", "Use an allowed value, such as epochs=10."),
        ("optim=3", "Set a key of the section, such as optim.KEY=VALUE."),
        ("optim.schedule=multi_step", "Set optim.milestones=[30, 60], for example."),
        ("loss_scale=3", "Set precision=fp16, or loss_scale=dynamic."),
    ],
)  # fmt: skip
def test_the_fix_is_the_nearest_setting_also_by_its_name_in_other_tools_or_an_allowed_value(
    override: str, fix: str
) -> None:
    assert fails(override).slots["fix"].startswith(fix)


def test_every_name_of_other_tools_leads_to_a_setting() -> None:
    from samebits.recipes.catalog import find, list_recipes

    known = {setting.key for name in list_recipes() for setting in settings(find(name).config_class)}
    assert set(_ALIASES.values()) <= known


@pytest.mark.parametrize(
    ("override", "what", "allowed"),
    [
        ("epochs=many", 'epochs can\'t be "many"', "int > 0"),
        ("epochs=0", "epochs can't be 0", "int > 0"),
        ("epochs=2.5", "epochs can't be 2.5", "int > 0"),
        ("epochs=true", "epochs can't be true", "int > 0"),
        ("epochs='3'", 'epochs can\'t be "3"', "int > 0"),
        ("epochs=", "epochs can't be null", "int > 0"),
        ("epochs.x=3", "epochs can't be {x: 3}", "int > 0"),
        ("optim.lr=-1", "optim.lr can't be -1", "float > 0"),
        ("optim.lr=.nan", "optim.lr can't be nan", "float > 0"),
        ("optim.lr=.inf", "optim.lr can't be inf", "float > 0"),
        ("optim.peak_at=1.5", "optim.peak_at can't be 1.5", "float from 0 to 1"),
        ("optim.name=sdg", 'optim.name can\'t be "sdg"', "sgd | adam | adamw"),
        ("optim.clip_norm=0", "optim.clip_norm can't be 0", "float > 0 or null"),
        ("optim.milestones=[1, x]", 'optim.milestones[1] can\'t be "x"', "list of float > 0"),
        ("optim.betas=[0.9]", "optim.betas", "list of 2 float >= 0 and < 1"),
        ("optim.nesterov=1", "optim.nesterov can't be 1", "true | false"),
        ("checkpoint.every=x", 'checkpoint.every can\'t be "x"', 'like "200 steps"'),
        ("data.root=", "data.root can't be null", "path"),
        ("data.names=cat", 'data.names can\'t be "cat"', "list of text"),
        ("optim=3", "optim can't be 3", "a section with name, lr, lr_for_batch"),
        ("optim=null", "optim can't be null", "a section with name, lr, lr_for_batch"),
        ("device=gpu", 'device can\'t be "gpu"', "auto | cpu | cuda"),
        (f"device={'x' * 300}", "device can't be", "auto | cpu | cuda"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(override: str, what: str, allowed: str) -> None:
    if len(override) > 80:
        with pytest.raises(ConfigError) as caught:
            load(Config, [PRESET], [override])
        error = caught.value
    else:
        error = fails(override)
    assert error.what.startswith(what)
    assert len(error.what) < 70
    assert error.slots["given"] == f"on the command line: {override}"
    assert error.slots["allowed"].startswith(allowed)


def test_a_missing_setting_is_an_error_with_its_meaning() -> None:
    error = fails(layers=(mapping_layer({"recipe": "shapes"}, "x"),))
    assert error.what == "data.root is missing"
    assert error.slots["allowed"] == "path: folder with the images"
    assert "data.root=VALUE" in error.slots["fix"]


def test_settings_that_do_not_fit_together_are_named_with_their_places() -> None:
    error = fails("global_batch=16", layers=(PRESET, mapping_layer({"micro_batch": 32}, "my.yaml:4")))
    assert error.what == "micro_batch (32) is more than global_batch (16)"
    assert error.slots["given"] == "on the command line: global_batch=16\nmy.yaml:4  micro_batch: 32"
    assert "(default)  optim.milestones: []" in fails("optim.schedule=multi_step").slots["given"]


def test_the_first_fault_comes_in_full_and_the_others_in_a_line_each() -> None:
    error = fails("epochs=x", "optim.lrr=1", "device=y", layers=(mapping_layer({"recipe": "shapes"}, "x"),))
    assert error.what == "optim.lrr is not a setting"
    given = 'on the command line: optim.lrr=1\nalso: epochs can\'t be "x"\nalso: device can\'t be "y"\n'
    assert error.slots["given"] == f"{given}also: data.root is missing"


@pytest.mark.parametrize(
    ("override", "what", "cause"),
    [
        *(
            (text, f"{text} is not of the form key=value", "")
            for text in ("epochs", "=3", "optim..lr=3", "a b=3", ".=1")
        ),
        ("optim.milestones=[1,", "the value of optim.milestones is not YAML", ""),
        ("epochs=!!int abc", "", "'abc' is not a whole number"),
        (f"data.root={os.fsdecode(bytes([255]))}", r"'data.root=\udcff' is not text in UTF-8", ""),
        ("recipe=other", "recipe can't be changed", ""),
    ],
)
def test_an_override_that_can_not_be_read_is_refused(override: str, what: str, cause: str) -> None:
    error = fails(override)
    assert what in error.what
    assert cause in str(error.slots.get("cause"))
    if "is not" in what + cause and "form" not in what and "UTF-8" not in what:
        assert error.slots["given"] == f"on the command line: {override}"


def test_settings_that_can_not_be_written_as_json_are_refused() -> None:
    assert "Invalid JSON" in fails(layers=(PRESET, mapping_layer({"data": {"root": "\ud800"}}, "recipe.py"))).what


def test_a_preview_leaves_out_what_is_missing_but_refuses_what_is_wrong() -> None:
    bare = mapping_layer({"recipe": "shapes"}, "x", is_preset=True)
    values, diff = preview(Config, [bare], ["epochs=3"])
    assert values["epochs"] == 3
    assert values["data"] == {"names": []}
    assert diff == {"epochs": 3}
    with pytest.raises(ConfigError, match="epochs can't be 0"):
        preview(Config, [bare], ["epochs=0"])


def test_a_recipes_own_check_is_explained() -> None:
    class Checked(Config):
        @model_validator(mode="after")
        def _seed_is_even(self) -> Checked:
            if self.seed % 2:
                raise ValueError(f"seed {self.seed} is odd")
            return self

    error = fails("seed=3", model=Checked)
    assert error.what == "seed 3 is odd"
    assert error.slots["given"] == "on the command line: seed=3"


def test_a_key_with_a_dot_in_a_file_is_refused_with_the_right_form(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("optim.lr: 0.2\n")
    with pytest.raises(ConfigError) as caught:
        load(RunConfig, [mapping_layer({"recipe": "x"}, "here"), read_layer(tmp_path / "my.yaml")])
    assert caught.value.what == "optim.lr is written with a dot"
    assert caught.value.slots["given"].endswith("my.yaml:1")
    assert all(text in caught.value.slots["fix"] for text in ("optim: {lr: 0.2}", "optim.lr=0.2"))


def test_all_settings_are_shown_for_what_was_typed() -> None:
    for source, shown in ((None, "mnist"), ("digits", "digits")):
        with pytest.raises(ConfigError) as caught:
            load(RunConfig, [replace(mapping_layer({"recipe": "mnist"}, "here"), source=source)], ["lrr=1"])
        assert caught.value.slots["fix"].endswith(f"For all settings: samebits config {shown}")
