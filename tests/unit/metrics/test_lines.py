"""Lines as read against true ones: figures by hand, and the same figures however lines are shared out."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.data.samples import Batch
from samebits.metrics.text import TextMetric

pairs = st.lists(st.tuples(st.text("ab你", max_size=4), st.text("ab你", max_size=4)), max_size=20)


def lines(num_worst: int = 3) -> TextMetric:
    """Outputs are the texts as read, targets the true texts."""
    return TextMetric(list, lambda batch: batch.targets, num_worst)


def batch(rows: list[tuple[str, str]], start: int = 0) -> tuple[Any, Batch]:
    indices = torch.arange(start, start + len(rows))
    return [text for text, _ in rows], Batch(None, [truth for _, truth in rows], indices)


def test_figures_are_those_counted_by_hand() -> None:
    metric = lines()
    metric.add(*batch([("abc", "abc"), ("ab", "abc"), ("你好", "您好"), ("", ""), ("aa", "")]))
    assert metric.num_samples == 5
    assert metric.result() == {"line_accuracy": 2 / 5, "cer": 4 / 8}
    assert metric.state()["worst"] == [[2, 4, "", "aa"], [1, 1, "abc", "ab"], [1, 2, "您好", "你好"]]


@settings(max_examples=100, deadline=None)
@given(rows=pairs, data=st.data())
def test_any_sharing_gives_the_same_figures_and_worst_lines(rows: list[tuple[str, str]], data: st.DataObject) -> None:
    whole = lines()
    whole.add(*batch(rows))
    cut = data.draw(st.integers(0, len(rows)))
    first, second, merged = lines(), lines(), lines()
    first.add(*batch(rows[:cut]))
    second.add(*batch(rows[cut:], start=cut))
    for part in data.draw(st.permutations([first, second])):
        merged.merge(json.loads(json.dumps(part.state())))
    assert merged.state() == whole.state()
    if rows:
        assert merged.result() == whole.result()


def test_no_lines_have_no_accuracy() -> None:
    with pytest.raises(ValueError, match="no lines were added"):
        lines().result()
