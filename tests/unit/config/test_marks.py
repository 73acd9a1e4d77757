"""Every setting says whether it changes the result; every row of the table of exclusions is refused."""

from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from samebits.config.describe import settings
from samebits.config.schema import DATA_MARKS, EXCLUSIONS, Exclusion, Mark, RunConfig, first_met, marks_of
from samebits.provenance.identity import is_free
from samebits.recipes.catalog import find, list_recipes

EFFECTS = {Mark.RESULT, Mark.EXECUTION, Mark.VALIDATION, Mark.MACHINE}
# Values that meet a condition without a value of its own.
MET_BY = {"activation_checkpointing": True, "optim.layer_decay": 0.5}


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_every_setting_and_section_says_whether_it_changes_the_result(name: str) -> None:
    assert len(marks_of(name) & EFFECTS) == 1


def test_marks_stand_on_fields_of_the_root_where_they_are_read() -> None:
    # A mark within a section would have no effect, silently.
    for recipe in list_recipes():
        config_class = find(recipe).config_class
        for field in config_class.model_fields.values():
            for inner in getattr(field.annotation, "model_fields", {}).values():
                assert not any(isinstance(item, Mark) for item in inner.metadata), inner


def test_a_setting_whose_text_says_that_it_does_not_change_results_may_change_at_a_resume() -> None:
    for recipe in list_recipes():
        for setting in settings(find(recipe).config_class):
            text = setting.meaning.lower()
            says = "does not change results" in text or "results do not change" in text
            if says and not setting.is_section:
                assert is_free(setting.key), setting.key


def test_the_names_of_data_with_a_mark_are_those_of_recipes() -> None:
    names = {setting.path[1] for name in list_recipes() for setting in settings(find(name).config_class)
             if setting.path[0] == "data" and len(setting.path) == 2}  # fmt: skip
    assert DATA_MARKS.keys() <= names


@pytest.mark.parametrize(
    ("name", "stops_early", "is_free_now"),
    [
        ("optim.lr", False, False), ("model.width", False, False), ("data.size_px", False, False),
        ("checkpoint.every", True, True), ("data.root", True, True), ("data.root", False, True),
        ("data.eval_sets.night", False, True), ("data.eval_sets.night", True, False), ("eval_every", True, False),
        ("eval_batch", False, True),
    ],
)  # fmt: skip
def test_what_may_change_at_a_resume_follows_from_the_marks(name: str, stops_early: bool, is_free_now: bool) -> None:
    config = RunConfig.model_validate({"recipe": "x", "stop_early": {"patience": 2 if stops_early else None}})
    assert is_free(name, config) == is_free_now


def _values(row: Exclusion) -> dict[str, Any]:
    """Return settings that meet all conditions of a row."""
    values: dict[str, Any] = {"recipe": "x"}
    for condition in (row.when, row.not_with):
        name, equals, wanted = condition.partition("=")
        *above, key = name.removesuffix("!").split(".")
        if not equals:
            value: Any = MET_BY[name]
        elif name.endswith("!"):
            field = RunConfig.model_fields[key].annotation
            literal = next(part for part in (field, *get_args(field)) if get_origin(part) is Literal)
            others = [choice for choice in get_args(literal) if choice != wanted]
            value = others[0] if others else 1024.0
        else:
            value = {"true": True}.get(wanted, wanted)
        section = values
        for word in above:
            section = section.setdefault(word, {})
        section[key] = value
    return values


@pytest.mark.parametrize("row", EXCLUSIONS, ids=lambda row: f"{row.when} {row.not_with}".replace(" ", "_"))
def test_each_exclusion_is_refused_with_both_settings_and_a_fix(row: Exclusion) -> None:
    values = _values(row)
    with pytest.raises(ValidationError) as error:
        RunConfig.model_validate(values)
    message = error.value.errors()[0]["msg"]
    one = row.when.partition("=")[0].removesuffix("!")
    assert one in message
    assert "cannot be combined with" in message
    assert message.endswith(f"fix: {row.do}")


def test_each_condition_names_a_setting_and_each_fix_begins_with_a_verb() -> None:
    config = RunConfig(recipe="x")
    for row in EXCLUSIONS:
        assert not all(first_met(config, text) for text in (row.when, *row.not_with.split(" and "))), row
        assert row.do.startswith("Set "), row
        assert not row.why or row.why.startswith(", "), row


def test_a_condition_is_named_with_its_value() -> None:
    config = RunConfig(recipe="x", batch_norm="sync", precision="bf16")
    assert first_met(config, "compile=true", "precision!=fp32", "batch_norm=sync") == "precision=bf16"
    assert first_met(config, "batch_norm=sync") == "batch_norm=sync"
    assert first_met(config, "optim.layer_decay", "report.trackers") == ""
