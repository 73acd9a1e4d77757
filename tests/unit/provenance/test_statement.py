"""`provenance.json`: its form, its root, and what a stranger may have put into it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.errors import CheckpointError
from samebits.provenance.record import (
    Evaluation,
    RunStatement,
    make_statement,
    read_statement_and_files,
    sha256_of_json,
)

SHA = "a" * 64
RECORD = RunStatement(
    settings={"epochs": 2, "optim.milestones": [30, 60], "recipe": "digits"},
    chain="c" * 64,
    num_steps=46,
    code=[{"code of samebits": "0123456789abcdef"}],
    environment=[{"torch": "2.15.0+cpu", "processor": "a CPU", "numpy": "2.4.0"}],
    data={"training sample 3": "fedcba9876543210"},
    dataset_info_sha256="d" * 64,
    evaluations=[Evaluation(23, {"top1": 0.5, "loss": None}), Evaluation(46, {"top1": 1.0, "loss": 0.25})],
    checkpoints={"step-000046": {"weights.safetensors": SHA, "optimizer.safetensors": SHA}},
    weights_sha256=SHA,
)
FILES = {"weights.safetensors": SHA, "steps.bin": "b" * 64}


def plain() -> Any:
    return json.loads(json.dumps(make_statement(RECORD, FILES, "run-1", 10.0, 20.0)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "provenance.json"


def test_a_statement_has_the_form_of_in_toto_and_slsa() -> None:
    statement = plain()
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"][0] == {"name": "weights.safetensors", "digest": {"sha256": SHA}}
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["epochs"] == 2
    assert {"uri": "pkg:pypi/torch@2.15.0+cpu"} in definition["resolvedDependencies"]
    assert {"name": "code of samebits", "digest": {"sha256First16": "0123456789abcdef"}} in definition[
        "resolvedDependencies"
    ]
    assert statement["predicate"]["runDetails"]["metadata"]["startedOn"] == "1970-01-01T00:00:10Z"


def test_a_statement_is_read_as_it_was_made(path: Path) -> None:
    path.write_text(json.dumps(plain()))
    record, files = read_statement_and_files(path)
    assert (record, files) == (RECORD, FILES)
    assert record.root == RECORD.root == plain()["predicate"]["runDetails"]["byproducts"][0]["digest"]["sha256"]


CHANGES: dict[str, Any] = {
    "settings": {"epochs": 3},
    "chain": "e" * 64,
    "num_steps": 47,
    "code": [{"code of samebits": "1123456789abcdef"}],
    "environment": [{"torch": "2.15.1+cpu"}],
    "data": {"training sample 3": "0edcba9876543210"},
    "dataset_info_sha256": "e" * 64,
    "evaluations": [Evaluation(46, {"top1": 1.0, "loss": 0.25})],
    "checkpoints": {},
    "weights_sha256": "b" * 64,
}


def test_each_entry_is_part_of_the_root() -> None:
    assert set(CHANGES) == set(vars(RECORD))
    roots = {replace(RECORD, **{name: value}).root for name, value in CHANGES.items()}
    assert len(roots | {RECORD.root}) == len(CHANGES) + 1


def test_a_metric_that_is_a_whole_number_gives_the_root_that_is_read_again(path: Path) -> None:
    record = replace(RECORD, evaluations=[Evaluation.of(46, {"errors": 3, "top1": True, "huge": 10**400})])
    assert record.evaluations[0].metrics == {"errors": 3.0, "top1": 1.0, "huge": 10**400}
    record = replace(RECORD, evaluations=[Evaluation.of(46, {"errors": 3})])
    path.write_text(json.dumps(make_statement(record, FILES, "run-1", 10.0, 20.0)))
    assert read_statement_and_files(path)[0].root == record.root


def test_a_metric_that_is_not_finite_is_null_in_the_root_as_in_the_records() -> None:
    metrics = {"loss": float("nan"), "errors": float("inf"), "top1": 0.5}
    assert Evaluation.of(3, metrics).metrics == {"loss": None, "errors": None, "top1": 0.5}


def test_the_order_of_names_does_not_change_the_root() -> None:
    assert sha256_of_json({"a": 1, "b": [1.5, None]}) == sha256_of_json({"b": [1.5, None], "a": 1})


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "settings"])
def test_an_entry_that_was_altered_is_found_by_the_root(path: Path, name: str) -> None:
    statement = plain()
    other = make_statement(replace(RECORD, **{name: CHANGES[name]}), FILES, "run-1", 10.0, 20.0)
    internal = other["predicate"]["buildDefinition"]["internalParameters"]
    statement["predicate"]["buildDefinition"]["internalParameters"] = internal
    path.write_text(json.dumps(json.loads(json.dumps(statement))))
    with pytest.raises(CheckpointError, match="was altered: its root is not that of its record"):
        read_statement_and_files(path)[0]


def test_dependencies_that_are_not_those_of_the_record_are_found(path: Path) -> None:
    for edit in (
        lambda each: each.pop(0),
        lambda each: each[0]["digest"].update(sha256First16="0" * 16),
        lambda each: each.append({"uri": "pkg:pypi/torch@9"}),
        lambda each: each.append({"name": "more", "digest": {}}),
    ):
        statement = plain()
        edit(statement["predicate"]["buildDefinition"]["resolvedDependencies"])
        path.write_text(json.dumps(statement))
        with pytest.raises(CheckpointError, match="dependencies are not those of its record"):
            read_statement_and_files(path)[0]


def internal(statement: Any) -> Any:
    return statement["predicate"]["buildDefinition"]["internalParameters"]


HOSTILE: dict[str, Callable[[Any], object]] = {
    "no predicate": lambda each: each.pop("predicate"),
    "predicate is a list": lambda each: each.update(predicate=[]),
    "no subject": lambda each: each.pop("subject"),
    "subject is a number": lambda each: each.update(subject=3),
    "subject of texts": lambda each: each.update(subject=["a", "b"]),
    "other predicate": lambda each: each.update(predicateType="https://slsa.dev/provenance/v0.2"),
    "no root": lambda each: each["predicate"]["runDetails"]["byproducts"].clear(),
    "settings are a list": lambda each: each["predicate"]["buildDefinition"].update(externalParameters=[1]),
    "negative steps": lambda each: internal(each).update(num_steps=-1),
    "huge steps": lambda each: internal(each).update(num_steps=1 << 60),
    "steps are text": lambda each: internal(each).update(num_steps="many"),
    "steps are infinite": lambda each: internal(each).update(num_steps=float("inf")),
    "chain is no hash": lambda each: internal(each).update(chain="../../etc"),
    "chain with a line break": lambda each: internal(each).update(chain="c" * 64 + "\n"),
    "checkpoint elsewhere": lambda each: internal(each).update(checkpoints={"../../../tmp": {}}),
    "checkpoint of a huge step": lambda each: internal(each).update(checkpoints={"step-" + "9" * 400: {}}),
    "evaluation without step": lambda each: internal(each).update(evaluations=[{"metrics": {}}]),
    "metrics are text": lambda each: internal(each)["evaluations"][0].update(metrics="good"),
    "code is an object": lambda each: internal(each).update(code={"a": "b"}),
    "one entry more": lambda each: internal(each).update(more=1),
    "one entry less": lambda each: internal(each).pop("data"),
    "lone surrogate": lambda each: internal(each)["data"].update(sample="\ud800"),
    "dependencies are texts": lambda each: each["predicate"]["buildDefinition"].update(resolvedDependencies=[1, None]),
    "no dependencies": lambda each: each["predicate"]["buildDefinition"].pop("resolvedDependencies"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_statement_is_refused_with_a_fix(path: Path, name: str) -> None:
    statement = plain()
    HOSTILE[name](statement)
    path.write_text(json.dumps(statement))
    with pytest.raises(
        CheckpointError, match=r"is not a statement of this version|its root is not that of its record"
    ) as raised:
        read_statement_and_files(path)[0]
    assert "--from-scratch" in raised.value.slots["fix"]


@pytest.mark.parametrize("depth", [150, 900, 100_000])
def test_settings_nested_deeply_are_refused_without_a_traceback(path: Path, depth: int) -> None:
    text = json.dumps(plain()).replace('"epochs": 2', '"epochs": ' + "[" * depth + "]" * depth)
    path.write_text(text)
    with pytest.raises(CheckpointError):
        read_statement_and_files(path)[0]


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"\xff\xfe", b"{", b'{"predicate": NaN}', b"[[]]" * 9])
def test_what_is_no_json_object_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a statement"):
        read_statement_and_files(path)[0]


def test_a_file_that_is_no_plain_file_or_too_large_is_refused_at_once(path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_statement_and_files(path)[0]
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_statement_and_files(path)[0]
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="at most"):
        read_statement_and_files(path)[0]
    path.write_bytes(b'{"a": [' + b"{}," * 5_000_000 + b"{}]}")
    with pytest.raises(CheckpointError, match="memory"):
        read_statement_and_files(path)[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in items for place in places(item, (*at, key)))]


@given(data=st.data(), value=JSON)
def test_a_value_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, value: Any) -> None:
    statement = plain()
    *way, last = data.draw(st.sampled_from(places(statement)[1:]))
    inner = statement
    for key in way:
        inner = inner[key]
    inner[last] = value
    path = tmp_path_factory.mktemp("any") / "provenance.json"
    path.write_text(json.dumps(statement))
    try:
        record = read_statement_and_files(path)[0]
    except CheckpointError:
        return
    assert record == RECORD  # what is outside of the record, such as times
