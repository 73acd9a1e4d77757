"""Errors: their five slots, and their way to other processes as JSON."""

import json
import pickle
from typing import Any

import pytest

from samebits import errors
from samebits.errors import KINDS, DataError, SamebitsError, TrainError, from_json, to_json

ALL_SLOTS = {"given": "1", "where": "2", "allowed": "3", "cause": "4", "fix": "5"}


def test_slots_are_printed_in_one_order_however_they_were_given() -> None:
    lines = "error: no\n  given    1\n  where    2\n  allowed  3\n  cause    4\n  fix      5"
    assert str(SamebitsError("no", **ALL_SLOTS)) == lines
    assert str(SamebitsError("no", **dict(reversed(ALL_SLOTS.items())))) == lines
    error = SamebitsError("no", fix=5)
    error.slots["given"] = "1"
    assert str(error) == "error: no\n  given  1\n  fix    5"
    assert error.line == "no; given: 1; fix: 5"


def test_empty_slots_are_left_out() -> None:
    assert SamebitsError("no", given=None, where="", cause=0).slots == {"cause": "0"}


def test_a_slot_of_another_name_is_a_bug() -> None:
    with pytest.raises(TypeError, match="problem"):
        SamebitsError("no", problem="x")  # type: ignore[call-arg]


def test_a_copy_keeps_the_kind_and_the_other_slots() -> None:
    error = DataError("no", given=1, fix="a").with_slots(fix="b", where="here")
    assert type(error) is DataError
    assert (error.what, error.slots) == ("no", {"given": "1", "where": "here", "fix": "b"})
    assert error.with_slots("yes", given=None).what == "yes"
    assert "given" not in error.with_slots(given=None).slots


def test_the_registry_has_every_kind_of_the_package() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SamebitsError)}
    assert set(KINDS.values()) == kinds
    assert all(name == kind.__name__ for name, kind in KINDS.items())


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_error_comes_back_from_json_and_from_a_loader_s_process(kind: type[SamebitsError]) -> None:
    error = kind("it is\nwrong", **ALL_SLOTS)
    for back in (from_json(json.loads(json.dumps(to_json(error)))), pickle.loads(pickle.dumps(error))):
        assert type(back) is kind
        assert (back.what, back.slots) == (error.what, error.slots)


def test_a_kind_of_a_recipe_becomes_the_kind_of_the_package_that_it_is_derived_from() -> None:
    mine = type("MyError", (TrainError,), {})
    namesake = type("ConfigError", (DataError,), {})
    assert type(from_json(to_json(mine("no")))) is TrainError
    assert type(from_json(to_json(namesake("no")))) is DataError


def test_slots_of_another_version_are_left_out() -> None:
    old: dict[str, Any] = {"kind": "DataError", "what": "no", "slots": {"nearest": "x", "self": 1, "fix": "mend it"}}
    assert from_json(old).slots == {"fix": "mend it"}


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", {}, {"kind": "OSError", "what": "no", "slots": {}},
        {"kind": ["DataError"], "what": "no", "slots": {}}, {"kind": "DataError", "what": 3, "slots": {}},
        {"kind": "DataError", "what": "no", "slots": None}, {"kinds": ["DataError"], "what": "no", "slots": {}},
    ],
)  # fmt: skip
def test_what_describes_no_error_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not an error"):
        from_json(value)


def test_a_long_text_of_another_process_is_cut() -> None:
    error = from_json({"kind": "DataError", "what": "x" * 1_000_000, "slots": {"fix": "y" * 1_000_000}})
    assert len(str(error)) < 12_000
