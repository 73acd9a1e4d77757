"""YAML files, and the texts of intervals, numbers of processes and given settings, as people write them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.config.document import parse, parse_value, read, to_yaml
from samebits.config.given import as_overrides, given_path
from samebits.config.interval import parse_interval
from samebits.errors import ConfigError
from samebits.process_range import MAX_NODES, ProcessRange, parse_range


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1E5", 1e5), (".5", 0.5), ("-3", -3), ("010", 10), ("0.1", 0.1), ("true", True), ("no", "no"),
        ("on", "on"), ("null", None), ("~", None), ("", None), ("1:30", "1:30"), ("2024-01-02", "2024-01-02"),
        ("'3'", "3"), ("[1, 2.5, x]", [1, 2.5, "x"]), ("{a: 1}", {"a": 1}), (".inf", float("inf")),
        ("~/data", "~/data"), ("/data/a b", "/data/a b"), ("1e", "1e"), ("3px", "3px"), ("!!int '3'", 3),
        ("!!float 3", 3.0), ("!!bool True", True),
    ],
)  # fmt: skip
def test_a_plain_word_is_read_as_people_mean_it(text: str, value: object) -> None:
    read = parse_value(text)
    assert read == value
    assert type(read) is type(value)


def test_every_key_has_its_line() -> None:
    document = parse("# comment\nepochs: 3\n\noptim:\n  lr: 0.1\n  betas: [0.9,\n    0.95]\n", "my.yaml")
    assert document.values == {"epochs": 3, "optim": {"lr": 0.1, "betas": [0.9, 0.95]}}
    lines = {("epochs",): 2, ("optim",): 4, ("optim", "lr"): 5, ("optim", "betas"): 6}
    assert document.origins == {key: f"my.yaml:{line}" for key, line in lines.items()}


def test_an_empty_file_sets_nothing() -> None:
    assert parse("", "my.yaml").values == {}
    assert parse("# nothing yet\n", "my.yaml").values == {}


def test_an_anchor_can_be_used_again() -> None:
    assert parse("a: &x {lr: 1}\nb: *x", "my.yaml").values == {"a": {"lr": 1}, "b": {"lr": 1}}


@pytest.mark.parametrize(
    ("text", "what", "given"),
    [
        ("epochs: 3\nepochs: 4", "epochs is given twice", "my.yaml:2, and before on line 1"),
        ("optim:\n  lr: 1\n  lr: 2", "optim.lr is given twice", "my.yaml:3"),
        ("a: 1\nb: [1, 2\nc: 3", "not YAML", "my.yaml:3: c: 3"),
        ("a: 1\n\tb: 2", "not YAML", "my.yaml:2"),
        ("- 1\n- 2", "holds no settings", "- 1 - 2"),
        ("hello", "holds no settings", "hello"),
        ("a: 1\nb: !!python/object:os.system {}", "tag", "my.yaml:2"),
        ("a: !mine 3", "tag !mine", "my.yaml:1"),
        ("a: &x\n  b: *x", "within itself", "my.yaml:"),
        ("? [1]\n: 2", "a key must be a word", "my.yaml:1"),
        ("a: 1\n---\nb: 2", "not YAML", "my.yaml:2"),
        ("a: *x", "not YAML", "my.yaml:1"),
        ("a: \x00", "not YAML", "my.yaml"),
        ("a: 1\nb: !!int abc", "'abc' is not a whole number", "my.yaml:2"),
        ("a: 1\nb: !!float x", "'x' is not a number", "my.yaml:2"),
        ("b: !!bool maybe", "'maybe' is not true or false", "my.yaml:1"),
        ("b: !!null x", "'x' is not null", "my.yaml:1"),
        ("a: 1\nb: " + 5000 * "1", "is a number of 5,000 digits", "my.yaml:2"),
        ("a: 1\nb: " + 3000 * "[", "not YAML", "my.yaml:2: b: [[["),
        ("a: &x " + 90 * "[" + 90 * "]" + "\nb: " + 90 * "[" + "*x" + 90 * "]", "more than 100 lists", "my.yaml:1"),
        ('a: 1\nb: "\\ud800"', "half a character", "my.yaml:2"),
        ('a: 1\n"\\ud800": 2', "half a character", "my.yaml:2"),
    ],
)
def test_yaml_that_can_not_be_is_refused_with_its_line(text: str, what: str, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "my.yaml")
    assert what in caught.value.what
    assert given in caught.value.slots["given"]


@pytest.mark.parametrize(
    ("text", "given", "problem", "fix"),
    [
        ("a: 1\n\tb: 2", "my.yaml:2: →b: 2", "a tab (→) stands where YAML allows only spaces", "Replace the tab"),
        ("optim:\r\n  lr: 1\r\n\tx: 2\r\n", "my.yaml:3: →x: 2", "a tab", "Replace the tab"),
        ("optim:\n  lr 0.1\n  nesterov: true\n", "my.yaml:2: lr 0.1", "needs a colon", "key: value"),
        ("a: 1\nb 2\nc: 3", "my.yaml:2: b 2", "needs a colon", "key: value"),
        ("epochs: 3\n# more\n optim: {}\n", "my.yaml:3: optim: {}", "indented like none above", "Indent it"),
        ("a: b: c", "my.yaml:1: a: b: c", "a key is not allowed here", "quotes"),
        ("a: 'x\nb: 2\nc: 3\n", "my.yaml:1: a: 'x", "the quote that begins here is not closed", "Close the quote"),
        ("a: 1\nb: {x: 1\n", "my.yaml:2: b: {x: 1", "the bracket that begins here", "Close the bracket"),
        (
            "b: [1, 2\nc: 3",
            "my.yaml:2: c: 3",
            "perhaps the bracket on line 1 is not closed",
            "Close the bracket on line 1",
        ),
        ("a:\n  - 1\n b: 2", "my.yaml:3: b: 2", "indented like none above", "Indent it"),
        ("a: 1\nb: [1,\n", "my.yaml:3: ", "the text ends where a value should follow", "close the bracket"),
        ("a: @x", "my.yaml:1: a: @x", "cannot begin with this character", "quotes"),
        ("a: 1\nb: \x07", "my.yaml:2: b:", "control character", "Remove"),
    ],
)
def test_what_is_no_yaml_is_explained_without_parser_terms(text: str, given: str, problem: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "my.yaml")
    facts = caught.value.slots
    assert str(facts["given"]).startswith(given)
    assert problem in str(facts["cause"])
    assert fix in str(facts["fix"])


def test_lists_as_deep_as_anybody_needs_are_read() -> None:
    value = parse_value(99 * "[" + "1" + 99 * "]")
    for _ in range(99):
        (value,) = value
    assert value == 1


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"my\.yaml can't be read: No such file"):
        read(tmp_path / "none.yaml", "my.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml is not text in UTF-8"):
        read(tmp_path / "binary.yaml", "binary.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12)
keys = st.text("abcdefgh_", min_size=1, max_size=8)
trees = st.dictionaries(
    keys, st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=8)
)


@settings(max_examples=50)
@given(trees)
def test_what_is_written_is_read_back(values: dict[str, Any]) -> None:
    assert parse(to_yaml(values), "x").values == values


@pytest.mark.parametrize("text", ["1e-3", "no", "010", "3", "null", "true", "", "1:30", "a: b", "#x", " x ", "1_000"])
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse(to_yaml({"a": text}), "x").values == {"a": text}


@pytest.mark.parametrize("text", ["!{} b", "*{}", "? {}\n: !x y", "a: !<{}> b"])
def test_a_name_of_a_million_letters_is_not_printed_whole(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text.format("k" * 900_000), "a.yaml")
    assert len(str(caught.value)) < 20_000
    assert len(caught.value.line) < 20_000


@pytest.mark.parametrize(
    ("text", "due"), [("3 steps", [3, 6, 9]), ("1 epoch", [4, 8]), ("2 epochs", [8]), ("1 step", list(range(1, 10)))]
)
def test_an_interval_of_steps_or_epochs_follows_from_the_step_alone(text: str, due: list[int]) -> None:
    interval = parse_interval(text)
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=0.0)] == due
    assert [step for step in range(1, 10) if interval.is_due(step, 4, elapsed_s=1e6)] == due


def test_an_interval_of_seconds_follows_from_the_time_alone() -> None:
    interval = parse_interval("5min")
    assert not interval.is_due(300, 1, elapsed_s=299.9)
    assert interval.is_due(7, 1000, elapsed_s=300.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", ProcessRange(4, 4)), ("2:4", ProcessRange(2, 4)), (" 1:1 ", ProcessRange(1, 1)), ("03", ProcessRange(3, 3))],
)
def test_a_number_or_a_range_is_read(text: str, size: ProcessRange) -> None:
    assert parse_range(text, "--procs") == size
    assert parse_range(str(size), "--procs") == size
    assert size.is_elastic == (":" in text and size.least < size.most)


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "3:2", "-1", "2:", ":2", "2-3", "two", "1:2:3", "1000000000", "4097", "2:4097"]
)
def test_what_is_neither_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_range(text, "--procs")
    assert f"--procs is {text!r}" in str(caught.value)
    assert "from 1 to 4096, or MIN:MAX" in str(caught.value)


def test_more_than_fit_on_a_machine_may_be_nodes() -> None:
    assert parse_range("4096", "--procs") == ProcessRange(4096, 4096)
    assert parse_range("5000", "--nodes", MAX_NODES) == ProcessRange(5000, 5000)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_range("9" * 5000, "--procs")


def test_a_mapping_in_either_form_becomes_what_the_command_line_takes() -> None:
    given = {"epochs": 3, "optim.lr": 0.1, "data": {"root": Path("a b"), "on": True}, "name": "ä", "best": None}
    assert as_overrides(given) == [
        "epochs=3", "optim.lr=0.1", "data.root=a b", "data.on=true", 'name="ä"', "best=null"
    ]  # fmt: skip
    assert as_overrides(["epochs=3"]) == ["epochs=3"]
    assert as_overrides(None) == as_overrides(()) == as_overrides({}) == []


def test_numbers_of_numpy_and_torch_and_paths_within_lists_are_taken() -> None:
    given = {"epochs": np.int64(1), "lr": np.float32(0.5), "on": np.bool_(True), "sizes": np.array([1, 2]),
             "decay": torch.tensor(0.25), "files": [Path("a"), np.int32(7)]}  # fmt: skip
    assert as_overrides(given) == [
        "epochs=1", "lr=0.5", "on=true", "sizes=[1, 2]", "decay=0.25", 'files=["a", 7]'
    ]  # fmt: skip


def test_what_is_no_setting_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optim\.lr is <object .*of the type object\n"):
        as_overrides({"optim": {"lr": object()}})


def test_a_path_is_never_by_chance_the_folder_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [given_path(path, "--out") for path in ("~/a", Path("~/a"), ".")]
    assert paths == [tmp_path / "a", tmp_path / "a", Path()]
    for text in ("", " "):
        with pytest.raises(ConfigError, match="--out is empty"):
            given_path(text, "--out")
    with pytest.raises(ConfigError, match="no user of that name"):
        given_path("~nobody-of-that-name/a", "--out")
