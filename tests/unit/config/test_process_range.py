"""How many there may be."""

import pytest

from samebits.config.process_range import MAX_NODES, ProcessRange, parse_range
from samebits.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4", ProcessRange(4, 4)), ("2:4", ProcessRange(2, 4)), (" 1:1 ", ProcessRange(1, 1)), ("03", ProcessRange(3, 3))],
)
def test_a_number_or_a_range_is_read(text: str, size: ProcessRange) -> None:
    assert parse_range(text, "--procs") == size
    assert parse_range(str(size), "--procs") == size


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


def test_a_range_is_elastic_and_a_number_is_not() -> None:
    assert ProcessRange(2, 3).is_elastic
    assert not ProcessRange(3, 3).is_elastic
