"""Metrics of others: objects of torchmetrics, and the one that the documentation shows."""

import importlib
import json
import math
import re
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.cluster import collectives
from samebits.data.samples import Batch
from samebits.errors import ConfigError
from samebits.metrics.metric import Metric, make_metric
from tests.runs import ROOT

NUM_CLASSES, BATCH = 4, 8


@cache
def own() -> ModuleType:
    """The metrics, imported by the tests that use them: torchmetrics takes seconds to import."""
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    return importlib.import_module("tests.unit.metrics.own_torchmetrics")


def metric() -> Metric:
    return make_metric(lambda: own().several(NUM_CLASSES))


def batches(seed: int, num_samples: int) -> list[tuple[torch.Tensor, Batch]]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(num_samples, NUM_CLASSES, generator=generator)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    places = torch.arange(num_samples).split(BATCH)
    return [(outputs[place], Batch(None, labels[place], place)) for place in places]


def merged(pairs: list[tuple[torch.Tensor, Batch]], world_size: int) -> dict[str, float]:
    total = metric()
    for rank in range(world_size):
        counted = metric()
        for outputs, batch in pairs[rank::world_size]:
            counted.add(outputs, batch)
        state = collectives.decode(collectives.encode(counted.state()))
        total.merge(json.loads(json.dumps(state)))  # plain values only
    assert total.num_samples == sum(len(batch) for _, batch in pairs)
    return total.result()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000), num_samples=st.integers(1, 60), world_size=st.integers(2, 5))
def test_values_have_equal_bits_at_any_world_size(seed: int, num_samples: int, world_size: int) -> None:
    pairs = batches(seed, num_samples)
    assert list(map(repr, merged(pairs, 1).items())) == list(map(repr, merged(pairs, world_size).items()))


@pytest.mark.full
def test_values_are_those_of_torchmetrics_over_all_samples() -> None:
    pairs = batches(0, 50)
    values = merged(pairs, 3)
    outputs, labels = torch.cat([outputs for outputs, _ in pairs]), torch.cat([batch.targets for _, batch in pairs])
    whole = {name: one(outputs, labels) for name, one in own().several(NUM_CLASSES).items() if name != "scaled"}
    assert (values["accuracy"], values["auroc"]) == (float(whole["accuracy"]), float(whole["auroc"]))
    assert [values[f"f1/{number}"] for number in range(NUM_CLASSES)] == whole["f1"].tolist()
    assert values["scaled/largest"] == float(outputs.max())


@pytest.mark.full
@pytest.mark.parametrize(
    ("given", "name"),
    [("a function", "BinaryAccuracy"), ("an object", "BinaryAccuracy"), ("a collection", "val_BinaryAccuracy")],
)
def test_metrics_are_named_as_in_torchmetrics(given: str, name: str) -> None:
    made, again = (make_metric(own().NAMED[given]) for _ in range(2))
    for one in (made, again):
        one.add(torch.tensor([0.9, 0.2], dtype=torch.bfloat16), Batch(None, torch.tensor([1, 1]), torch.arange(2)))
    again.merge(made.state())
    assert again.result() == {name: 0.5}
    assert (made.num_samples, again.num_samples) == (2, 4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("list", "BinaryAUROC .*its state preds is a list of all predictions"),
        ("mean", "its state mean has the reduction mean"),
        ("offset", "its state offset is summed and does not start at 0"),
        ("full state", "full_state_update"),
        ("no reduction", "its state mean_x has the reduction none"),
        ("composed", "it has no states of its own"),
    ],
)
def test_states_that_do_not_merge_exactly_are_refused_by_name(kind: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_metric(own().REFUSED[kind])


@pytest.mark.full
def test_a_state_may_become_another_type_than_its_default() -> None:
    made, other = (make_metric(own().Count) for _ in range(2))
    for one, size in ((made, 3), (other, 2)):
        one.add(torch.zeros(size, 1), Batch(None, torch.zeros(size), torch.arange(size)))
    made.merge(other.state())
    assert made.result() == {"Count": 5.0}


def test_the_metric_of_the_documentation_is_exact_in_any_order() -> None:
    page = (ROOT / "docs" / "own-model.md").read_text(encoding="utf-8")
    code = re.search(r"## The metric\n.*?```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"math": math}
    exec(code[1], names)
    outputs = torch.randn(30, generator=torch.Generator().manual_seed(0)) * 1000
    results = []
    for order in (range(3), reversed(range(3))):
        total = make_metric(names["MeanError"])
        for place in order:
            counted = make_metric(names["MeanError"])
            rows = torch.arange(place * 10, place * 10 + 10)
            counted.add(outputs[rows], Batch(None, torch.zeros(10), rows))
            total.merge(json.loads(json.dumps(counted.state())))
        results.append((total.num_samples, total.result()))
    assert results[0] == results[1]
    assert results[0][0] == 30
