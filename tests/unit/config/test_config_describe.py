import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from samebits.config.describe import Row, defaults, given, schema, settings, table
from samebits.config.schema import RunConfig, Settings


class Inner(Settings):
    title: str = Field(default="a", description="a title")


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Kinds(Settings):
    flag: bool = Field(default=False, description="d")
    number: int = Field(default=1, ge=1, le=4, description="d")
    big: int = Field(default=1, lt=2**40, description="d")
    ratio: Annotated[float, Field(gt=0, lt=0.5)] | None = Field(default=None, description="d")
    word: Literal["x", "y"] | None = Field(default=None, description="d")
    folder: Path = Field(default=Path("p"), description="d")
    pair: tuple[int, int] = Field(default=(1, 2), description="d")
    many: list[float] = Field(default=[], description="d")
    labels: dict[str, int] = Field(default={}, description="d")
    color: Color = Field(default=Color.RED, description="d")
    anything: Any = Field(default=None, description="d")
    mixed: list[Any] = Field(default=[], description="d")
    maybe: Inner | None = Field(default=None, description="d")
    needed: str = Field(description="d")
    inner: Inner = Field(description="d")


def test_types_are_described_in_words() -> None:
    assert {setting.key: setting.type for setting in settings(Kinds)} == {
        "flag": "true | false", "number": "int from 1 to 4", "big": "int < 2^40",
        "ratio": "float > 0 and < 0.5 or null", "word": "x | y or null", "folder": "path", "pair": "list of 2 int",
        "many": "list of float", "labels": "map", "color": "red | green", "anything": "any",
        "mixed": "list of any", "maybe": "section", "maybe.title": "text", "needed": "text",
        "inner": "section", "inner.title": "text",
    }  # fmt: skip


def test_what_is_given_is_each_setting_with_its_value_and_a_section_only_where_it_is_null() -> None:
    values = {"number": 2, "labels": {"a": 1}, "inner": {"title": "b"}, "maybe": None, "other": 3}
    found = {"number": 2, "labels": {"a": 1}, "inner.title": "b", "maybe": None}
    assert dict(given(Kinds, values)) == found
    assert dict(given(Kinds, {"maybe": {"title": "c"}})) == {"maybe.title": "c"}
    assert dict(given(Kinds, {})) == {}


def test_defaults_are_plain_values_and_leave_out_what_is_needed() -> None:
    values = defaults(Kinds)
    assert json.loads(json.dumps(values)) == values
    assert values["pair"] == [1, 2]
    assert values["inner"] == {"title": "a"}
    assert "needed" not in values


def test_the_table_shows_the_presets_values_and_sections_last() -> None:
    config = RunConfig(recipe="x", epochs=7).model_dump(mode="json")
    rows = table(RunConfig, config)
    assert Row("epochs", "int > 0 and <= 1000000000", "7", "Passes over the training set.") in rows
    meaning = "Decay rates of the moment estimates (adam, adamw, lamb, muon)."
    assert Row("optim.betas", "list of 2 float >= 0 and < 1", "[0.9, 0.999]", meaning) in rows
    first_section = next(number for number, row in enumerate(rows) if row.type == "section")
    assert all("." not in row.key for row in rows[:first_section])
    assert all("." in row.key or row.type == "section" for row in rows[first_section:])


def test_the_schema_stands_alone_and_needs_only_the_recipe() -> None:
    config = RunConfig(recipe="x", epochs=7).model_dump(mode="json")
    tree: dict[str, Any] = schema(RunConfig, config, "samebits x")
    text = json.dumps(tree)
    assert "$ref" not in text
    assert "$defs" not in text
    assert tree["required"] == ["recipe"]
    assert tree["additionalProperties"] is False
    assert tree["properties"]["epochs"]["default"] == 7
    optim = tree["properties"]["optim"]
    assert optim["additionalProperties"] is False
    assert "required" not in optim
    assert optim["properties"]["name"]["enum"] == ["sgd", "adam", "adamw", "lamb", "muon"]
    assert optim["properties"]["lr"]["exclusiveMinimum"] == 0


def test_the_schema_of_every_kind_can_be_made() -> None:
    tree = schema(Kinds, {"needed": "x"}, "kinds")
    assert tree["properties"]["inner"]["properties"]["title"]["type"] == "string"
    assert tree["properties"]["needed"]["default"] == "x"
