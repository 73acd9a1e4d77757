import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.cluster import collectives
from samebits.data.samples import Batch
from samebits.metrics import classification
from samebits.metrics.classification import Accuracy


def _batch(labels: list[int], start: int = 0) -> Batch:
    return Batch(None, torch.tensor(labels), torch.arange(start, start + len(labels)))


def _logits(choices: list[int], num_classes: int = 3) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), num_classes).float()


def test_top1_is_the_share_of_right_answers() -> None:
    metric = Accuracy(3)
    metric.add(_logits([0, 1, 2, 0]), _batch([0, 1, 1, 2]))
    assert metric.num_samples == 4
    assert metric.result()["top1"] == 0.5
    assert metric.state()["confusion"] == [[1, 0, 0], [0, 1, 1], [1, 0, 0]]


def test_the_loss_is_left_to_the_engine_which_knows_what_is_minimized() -> None:
    metric = Accuracy(3)
    metric.add(_logits([0]), _batch([0]))
    assert metric.result() == {"top1": 1.0}


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 60), num_parts=st.integers(1, 8), seed=st.integers(0, 1000))
def test_any_sharing_out_gives_the_same_state_and_figures(num_samples: int, num_parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, 5, generator=generator).round(decimals=1)
    labels = torch.randint(0, 5, (num_samples,), generator=generator)
    whole = Accuracy(5, num_worst=7)
    whole.add(logits, Batch(None, labels, torch.arange(num_samples)))
    owner = torch.randint(0, num_parts, (num_samples,), generator=generator)
    shared = Accuracy(5, num_worst=7)
    for part in reversed(range(num_parts)):
        mine = torch.nonzero(owner == part).flatten()
        metric = Accuracy(5, num_worst=7)
        for index in mine.tolist():
            metric.add(logits[index : index + 1], Batch(None, labels[index : index + 1], torch.tensor([index])))
        shared.merge(json.loads(json.dumps(metric.state())))
    assert shared.state() == whole.state()
    assert shared.result() == whole.result()


def test_the_worst_samples_are_kept_with_label_and_answer() -> None:
    metric = Accuracy(3, num_worst=2)
    metric.add(_logits([0, 1, 2]) * torch.tensor([[1.0], [5.0], [9.0]]), _batch([0, 2, 0], start=10))
    (first, second) = metric.state()["worst"]
    assert first[1:] == [12, 0, 2]
    assert second[1:] == [11, 2, 1]
    assert first[0] > second[0]


def test_of_equal_losses_the_lower_index_is_kept() -> None:
    metric = Accuracy(3, num_worst=2)
    metric.add(_logits([1, 1, 1]), _batch([0, 0, 0], start=5))
    assert [row[1] for row in metric.state()["worst"]] == [5, 6]


def test_outputs_that_are_not_finite_count_as_worst() -> None:
    metric = Accuracy(3)
    outputs = _logits([0, 1])
    outputs[1] = math.nan
    metric.add(outputs, _batch([0, 1]))
    assert metric.num_samples == 2
    assert metric.state()["worst"][0][:2] == [math.inf, 1]


def test_no_samples_have_no_accuracy() -> None:
    with pytest.raises(ValueError, match="no samples"):
        Accuracy(3).result()


def _states(num_classes: int, labels: torch.Tensor, logits: torch.Tensor, num_parts: int) -> list[dict[str, Any]]:
    """Count samples on several ranks, and return each rank's state as it is sent."""
    states = []
    for part in range(num_parts):
        metric = Accuracy(num_classes, num_top=5)
        mine = torch.arange(part, len(labels), num_parts)
        for few in mine.split(7):
            metric.add(logits[few], Batch(None, labels[few], few))
        states.append(collectives.decode(collectives.encode(metric.state())))
    return states


def _merged(num_classes: int, states: list[dict[str, Any]]) -> Accuracy:
    metric = Accuracy(num_classes, num_top=5)
    for state in states:
        metric.merge(state)
    return metric


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 9 classes as too many for a matrix."""
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 8)


def _samples(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (num_samples,), generator=generator), torch.randn(num_samples, 9, generator=generator)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("seed", range(5))
def test_without_a_matrix_all_figures_are_those_of_the_matrix(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels, logits = _samples(100, seed)
    sparse = [_merged(9, _states(9, labels, logits, num_parts)) for num_parts in (1, 2, 3)]
    assert "confusion" not in sparse[0].state()
    assert all(each.state() == sparse[0].state() for each in sparse)
    monkeypatch.setattr(classification, "MAX_DENSE_CLASSES", 9)
    dense = _merged(9, _states(9, labels, logits, 2))
    assert sparse[0].result() == dense.result()
    counts, matrix = sparse[0].state(), torch.tensor(dense.state()["confusion"])
    expected = (matrix.sum(1), matrix.diagonal(), matrix.sum(0))
    assert [counts[name] for name in ("samples", "correct", "predicted")] == [each.tolist() for each in expected]


def test_many_classes_take_little_memory_and_a_short_message() -> None:
    num_classes = 21_841  # ImageNet-21k; a matrix would take 3.8 GB
    labels = torch.arange(64) * 300
    logits = torch.nn.functional.one_hot((labels + torch.arange(64) % 2), num_classes).float()
    metric = Accuracy(num_classes)
    metric.add(logits, Batch(None, labels, torch.arange(64)))
    message = collectives.encode(metric.state())
    assert len(message) < 200_000
    merged = _merged(num_classes, [collectives.decode(message)] * 2)
    assert merged.num_samples == 128
    assert merged.result()["top1"] == 0.5
    assert sum(merged.state()["predicted"]) == 128
