"""How many there may be."""

from __future__ import annotations

import pytest

from lockstep.cluster.size import Size, parse_size
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"), [("4", Size(4, 4)), ("2:4", Size(2, 4)), (" 1:1 ", Size(1, 1)), ("03", Size(3, 3))]
)
def test_a_number_or_a_range_is_read(text: str, size: Size) -> None:
    assert parse_size(text, "--procs") == size
    assert parse_size(str(size), "--procs") == size


@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "-1", "2:", ":2", "2-3", "two", "1:2:3"])
def test_what_is_neither_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "--nodes")
    assert f"--nodes is {text!r}" in str(caught.value)
    assert "MIN:MAX" in str(caught.value)


def test_a_range_is_elastic_and_a_number_is_not() -> None:
    assert Size(2, 3).is_elastic
    assert not Size(3, 3).is_elastic
