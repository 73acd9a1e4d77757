"""Evaluation of an empty dataset, or of values that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from samebits.cluster.world import alone
from samebits.data.samples import DatasetSamples
from samebits.engine.evaluate import evaluate
from samebits.errors import DataError
from samebits.metrics.classification import Accuracy


def run(
    values: list[float], model: nn.Module | None = None, metric: Callable[[], Accuracy] = lambda: Accuracy(2)
) -> dict[str, float]:
    samples = DatasetSamples([(torch.tensor([value, 0.0]), 0) for value in values])
    figures, _ = evaluate(
        model or nn.Identity(), samples, alone("cpu"), loss=lambda outputs, batch: {"value": outputs[:, 0].mean()},
        metric=metric, batch_size=1,
    )  # fmt: skip
    return figures


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(DataError, match="validation set is empty"):
        run([])


def test_losses_of_both_infinities_have_no_mean() -> None:
    figures = run([math.inf, -math.inf, 1.0])
    assert math.isnan(figures["loss"])
    assert figures["top1"] == pytest.approx(2 / 3)


class Figures(Accuracy):
    def result(self) -> dict[str, Any]:
        return {"top1": np.float32(0.5), "loss": 99.0}


def test_the_loss_that_is_minimized_goes_before_a_metric_s_and_all_metrics_can_be_written_as_json() -> None:
    figures = run([1.0, 3.0], metric=lambda: Figures(2))
    assert json.loads(json.dumps(figures)) == {"loss": 2.0, "top1": 0.5}


class Careless(nn.Module):
    """Counts its calls, collects in a new buffer, and drops out in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(2).eval()
        self.free = nn.BatchNorm1d(2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.last = inputs[0] + 1
        return functional.dropout(inputs, 0.5, training=True)


def test_a_model_is_left_as_it_was() -> None:
    model = Careless()
    run([1.0, 2.0, 3.0], model=model)
    assert model.training
    assert model.free.training
    assert not model.frozen.training
    assert float(model.calls) == 0
    assert model.last.tolist() == [0, 0]
    assert not model.last.is_inference()


def test_random_numbers_in_evaluation_follow_from_the_samples() -> None:
    values = [float(value) for value in range(1, 33)]
    torch.manual_seed(1)
    first = run(values, model=Careless())
    torch.manual_seed(2)
    assert run(values, model=Careless()) == first
