from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.samples import Batch
from lockstep.metrics.classification import Accuracy


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


def test_the_loss_is_left_to_the_engine_which_knows_what_is_minimised() -> None:
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
