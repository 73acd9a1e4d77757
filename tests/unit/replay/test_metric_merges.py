"""What `samebits check` says about the merge of a metric's counts."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from samebits.replay import judge, probe
from samebits.replay.judge import Finding

PAIRS: list[Any] = [(0.1 * number, number) for number in range(6)]


class Mean:
    """A mean that merges exactly. Subclasses break it."""

    name = "error"

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, outputs: float, batch: int) -> None:
        self.values.append(outputs)

    def state(self) -> dict[str, Any]:
        return {"values": self.values}

    def merge(self, state: dict[str, Any]) -> None:
        self.values += state["values"]

    def result(self) -> dict[str, float]:
        return {self.name: math.fsum(self.values) / len(self.values)}


class FirstRankOnly(Mean):
    def merge(self, state: dict[str, Any]) -> None:
        self.values = self.values or state["values"]


class Raises(Mean):
    def merge(self, state: dict[str, Any]) -> None:
        raise KeyError("values")


class Nan(Mean):
    def result(self) -> dict[str, float]:
        return {"error": math.nan, "loss": super().result()["error"]}


class OtherNames(Mean):
    def result(self) -> dict[str, float]:
        return {f"of_{len(self.values)}": 1.0} if self.values[0] else super().result()

    def merge(self, state: dict[str, Any]) -> None:
        self.values = sorted([*self.values, *state["values"]], reverse=len(state["values"]) < len(PAIRS))


def findings(metric: type[Mean]) -> list[Finding]:
    parts: Any = SimpleNamespace(metric=metric)
    results = {str(size): probe._merged(parts, PAIRS, size) for size in probe.WORLDS}
    notes: Any = {"checks": {"metric": {"name": metric.__name__, "line": None, "results": results}}}
    return judge._merges(notes)


@pytest.mark.parametrize("name", ["error", "loss", "0"])
def test_a_metric_that_merges_passes_whatever_its_value_is_called(name: str) -> None:
    assert findings(type("Named", (Mean,), {"name": name})) == []


def test_a_value_that_is_not_a_number_is_equal_to_itself() -> None:
    assert findings(Nan) == []


def test_counts_of_one_rank_alone_are_found_with_both_values() -> None:
    [found] = findings(FirstRankOnly)
    assert "metric FirstRankOnly does not merge: error is 0.25 on 1 process, 0.2" in str(found)


def test_an_exception_of_merge_is_named() -> None:
    [found] = findings(Raises)
    assert "metric Raises does not merge: KeyError: 'values'" in str(found)


def test_a_name_that_only_some_worlds_have_is_found() -> None:
    [found] = findings(OtherNames)
    assert "does not merge: error is 0.25 on 1 process, None on 2" in str(found)
