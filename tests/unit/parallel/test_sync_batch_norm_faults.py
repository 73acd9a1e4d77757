"""Synchronized batch norm where micro-batches take different paths, fail, or cannot be synchronized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samebits.data.order import Order
from samebits.errors import ConfigError, TrainError
from samebits.parallel.reduce import Reducer
from tests.unit.parallel.sync_step import HERE, call, train_step


class Forking(nn.Module):
    """Passes its batch norm only with some samples; without a gradient, with others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(1, 4), nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        if inputs[0] == 1:
            return hidden
        normalized: Tensor = self.norm(hidden)
        return hidden + normalized.detach() if inputs[0] == 2 else normalized


@pytest.mark.parametrize(
    ("special", "says"),
    [
        (1.0, "micro-batch 0 is at norm, forward\nmicro-batch 2 is at its end"),
        (2.0, "micro-batch 0 is at norm, backward\nmicro-batch 2 is at its end"),
    ],
    ids=["forward", "backward"],
)
def test_micro_batches_that_part_ways_are_named(special: float, says: str) -> None:
    model = Forking()
    reducer = Reducer(model, HERE, synchronized=True)
    (step,) = Order(12, 12, 3).steps(HERE, stop=1)
    inputs = torch.zeros(12, 1)
    inputs[step.micro_batches[2].indices] = special

    def run(micro: Any) -> None:
        with reducer.micro_batch(micro):
            reducer.backward(model(inputs[micro.indices]).square().mean())

    reducer.begin(step)
    with pytest.raises(TrainError, match="do not reach the same layers") as caught:
        reducer.run(run)
    assert caught.value.slots["where"] == says
    assert "batch_norm=micro" in caught.value.slots["fix"]


def test_an_error_in_one_micro_batch_is_raised_and_the_next_step_is_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    reducer = Reducer(model, HERE, synchronized=True)
    expected = torch.stack(train_step(model, reducer, inputs, targets, 2))
    reducer.undo_buffers()
    calls: list[int] = []

    def failing(model: nn.Module, values: Tensor) -> Tensor:
        outputs = call(model, values)
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("no more")
        return outputs

    with pytest.raises(ArithmeticError, match="no more"):
        train_step(model, reducer, inputs, targets, 2, failing)
    reducer.undo_buffers()
    assert torch.equal(torch.stack(train_step(model, reducer, inputs, targets, 2)), expected)


def test_a_loop_that_runs_micro_batches_one_after_the_other_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    reducer = Reducer(model, HERE, synchronized=True)
    (step,) = Order(4, 4, 2).steps(HERE, stop=1)
    reducer.begin(step)
    with pytest.raises(AssertionError, match=r"reducer\.run"), reducer.micro_batch(step.micro_batches[0]):
        pass


def test_a_batch_norm_of_another_class_is_refused_by_name() -> None:
    class MyNorm(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(MyNorm(2)))
    with pytest.raises(ConfigError, match=r"cannot synchronize 1\.0, a MyNorm"):
        Reducer(model, HERE, synchronized=True)
