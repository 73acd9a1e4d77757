"""Metrics that merge, and metrics that do not, as `samebits check` judges them."""

import pytest

from samebits.replay.judge import _merges


def of(*results: dict[str, str] | str) -> list[str]:
    """What the check finds about a metric with these results on 1, 2, ... processes."""
    by_size = {str(size): each for size, each in enumerate(results, start=1)}
    notes = {"checks": {"metric": {"name": "Own", "line": None, "results": by_size}}}
    return [each.what.partition("merge: ")[2] for each in _merges(notes)]


@pytest.mark.parametrize("name", ["error", "top1", "loss"])
def test_a_metric_may_have_a_result_of_any_name(name: str) -> None:
    assert of({name: "0.25"}, {name: "0.25"}, {name: "0.25"}) == []
    assert of({name: "0.25"}, {name: "0.5"}) == [f"{name} is 0.25 on 1 process, 0.5 on 2"]


def test_a_merge_that_fails_is_reported_with_its_error() -> None:
    assert of({"error": "0.25"}, "KeyError: 'count'") == ["KeyError: 'count'"]
    assert of("ValueError: 1", "ValueError: 2") == ["ValueError: 1"]


def test_a_result_that_only_one_world_has_is_a_fault() -> None:
    assert of({"a": "1.0", "nan": "nan"}, {"a": "1.0", "nan": "nan"}) == []
    assert of({"a": "1.0"}, {"a": "1.0", "b": "2.0"}) == ["b is None on 1 process, 2.0 on 2"]
