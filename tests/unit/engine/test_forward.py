"""Faults of a recipe's loss and model are named; evaluation of nothing, or of values that are not finite."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F

from samebits.cluster.world import alone
from samebits.config.schema import RunConfig
from samebits.data.samples import Batch, DatasetSamples
from samebits.engine.evaluate import evaluate
from samebits.engine.forward import forward
from samebits.engine.job import MAX_TERMS
from samebits.errors import ConfigError, DataError
from samebits.metrics.classification import Accuracy
from samebits.parallel.running import RunningBuffers

BATCH = Batch(torch.ones(1, 3, 1, 1), torch.zeros(1), torch.zeros(1, dtype=torch.int64))


def job(loss: Any, model: nn.Module | None = None) -> Any:
    return SimpleNamespace(
        compiled=None,
        model=model or nn.Identity(),
        parts=SimpleNamespace(loss=lambda outputs, batch: loss),
        config=RunConfig(recipe="test", global_batch=16, micro_batch=16),
        order=SimpleNamespace(num_samples=17),
    )


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (torch.tensor(1.0), "returned a Tensor, not a dict"),
        ({}, "returned 0 terms"),
        ({str(number): torch.tensor(1.0) for number in range(MAX_TERMS + 1)}, "returned 9 terms"),
        ({"loss": 1.0}, "returned loss as a float, not a tensor"),
        ({"loss": torch.ones(2)}, "returned loss of shape (2,), not one number"),
    ],
)
def test_a_loss_of_another_form_is_named(loss: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        forward(job(loss), BATCH)
    assert text in str(caught.value)


def test_an_error_of_the_loss_has_the_samples_and_what_it_was_given() -> None:
    made = job(None)
    made.parts.loss = lambda outputs, batch: F.cross_entropy(outputs, batch.targets)
    batch = Batch(torch.ones(10, 3), torch.tensor([*range(3)] * 3 + [7]), torch.arange(20, 30))
    with pytest.raises(IndexError, match="Target 7 is out of bounds") as caught:
        forward(made, batch)
    assert caught.value.__notes__ == [
        "raised by the recipe's loss for samples 20 21 22 23 24 25 26 27 …; outputs: a tensor (10, 3) float32; "
        "targets: a tensor (10,) int64, 0 to 7"
    ]


def test_terms_are_added_up() -> None:
    names, total, values = forward(job({"a": torch.tensor(1.0, requires_grad=True), "b": torch.tensor(2.0)}), BATCH)
    assert (names, total.item(), values.tolist()) == (["a", "b"], 3.0, [1.0, 2.0] + [0.0] * (MAX_TERMS - 2))


def test_one_value_a_channel_is_too_few_for_batch_norm() -> None:
    with pytest.raises(ConfigError, match="one sample whose feature maps have one pixel") as caught:
        forward(job({}, nn.BatchNorm2d(3)), BATCH)
    assert "17 samples" in caught.value.slots["given"]
    with pytest.raises(ValueError, match="expected 4D input"):  # any other error is the recipe's own
        forward(job({}, nn.BatchNorm2d(3)), Batch(torch.ones(2, 3), BATCH.targets, BATCH.indices))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_inputs_may_be_a_named_tuple() -> None:
    moved = Batch(Pair(torch.ones(1), torch.zeros(1)), BATCH.targets, BATCH.indices).to(torch.device("cpu"))
    assert type(moved.inputs) is Pair
    assert moved.inputs.right.item() == 0


def test_a_buffer_that_can_not_be_kept_equal_is_named() -> None:
    model = nn.Module()
    model.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"buffer turn is torch\.complex64"):
        RunningBuffers(model)


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
