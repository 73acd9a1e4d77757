"""How many there may be."""

from __future__ import annotations

import pytest

from lockstep.cluster.size import MAX_NODES, Size, parse_size
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("4", Size(4, 4)), ("2:4", Size(2, 4)), (" 1:1 ", Size(1, 1)), ("03", Size(3, 3))]
)
def test_a_number_or_a_range_is_read(text: str, size: Size) -> None:
    assert parse_size(text, "--procs") == size
    assert parse_size(str(size), "--procs") == size


@pytest.mark.parametrize(
    "text", ["", "0", "0:2", "3:2", "-1", "2:", ":2", "2-3", "two", "1:2:3", "1000000000", "4097", "2:4097"]
)
def test_what_is_neither_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "--procs")
    assert f"--procs is {text!r}" in str(caught.value)
    assert "from 1 to 4096, or MIN:MAX" in str(caught.value)


def test_more_than_fit_on_a_machine_may_be_nodes() -> None:
    assert parse_size("4096", "--procs") == Size(4096, 4096)
    assert parse_size("5000", "--nodes", MAX_NODES) == Size(5000, 5000)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(ConfigError):
        parse_size("9" * 5000, "--procs")


def test_a_range_is_elastic_and_a_number_is_not() -> None:
    assert Size(2, 3).is_elastic
    assert not Size(3, 3).is_elastic
