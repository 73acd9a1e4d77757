"""Buffers of a model: every micro-batch starts from the step's values, and the mean change is applied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from samebits.errors import ConfigError
from samebits.parallel.running import RunningBuffers


class Counting(nn.Module):
    """Buffers of many kinds; the forward pass changes all but the mask."""

    averaged_buffers = ("mean", "calls", "small_calls", "hidden")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("small_calls", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, value: float) -> None:
        self.mean += value
        self.calls += 1
        self.small_calls += 2
        self.hidden -= value

    def values(self) -> list[Tensor]:
        return [self.mean.clone(), self.calls.clone(), self.small_calls.clone(), self.mask.clone(), self.hidden.clone()]


def test_every_micro_batch_starts_from_the_steps_values_and_the_mean_change_is_applied() -> None:
    model = Counting()
    buffers = RunningBuffers(model)
    before = model.values()
    buffers.start_step()
    total = torch.zeros(len(buffers))
    for value, weight in [(1.0, 0.25), (5.0, 0.75)]:
        model(value)
        total += weight * buffers.take_change()
        assert all(torch.equal(now, then) for now, then in zip(model.values(), before, strict=True))
    buffers.apply(total)
    assert model.mean.tolist() == [5.0, 5.0, 5.0]
    assert model.hidden.tolist() == [-4.0]
    assert model.calls.item() == 1
    assert model.small_calls.tolist() == [2, 2]
    assert model.small_calls.dtype == torch.int32
    assert model.mask.tolist() == [True, False]


def test_a_step_is_undone() -> None:
    model = Counting()
    buffers = RunningBuffers(model)
    before = model.values()
    buffers.start_step()
    model(3.0)
    buffers.apply(buffers.take_change())
    assert not torch.equal(model.mean, before[0])
    buffers.reset()
    assert all(torch.equal(now, then) for now, then in zip(model.values(), before, strict=True))


def test_batch_norm_counts_steps_and_averages_statistics() -> None:
    torch.manual_seed(0)
    model, alike = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    buffers = RunningBuffers(model)
    inputs = torch.randn(6, 4)
    buffers.start_step()
    total = torch.zeros(len(buffers))
    for half in inputs.split(3):
        model(half)
        total += 0.5 * buffers.take_change()
    buffers.apply(total)
    means = torch.stack([half.mean(0) for half in inputs.split(3)])
    assert model.num_batches_tracked.item() == 1
    torch.testing.assert_close(model.running_mean, 0.1 * means.mean(0))
    assert model.state_dict().keys() == alike.state_dict().keys()


def test_a_model_without_buffers_has_nothing_to_sum() -> None:
    buffers = RunningBuffers(nn.Linear(2, 2))
    buffers.start_step()
    assert len(buffers) == 0
    assert buffers.take_change().shape == (0,)


def test_a_buffer_that_is_replaced_is_named() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))

        def forward(self) -> None:
            self.total = self.total + 1

    model = nn.Sequential(Replacing())
    buffers = RunningBuffers(model)
    model[0]()
    with pytest.raises(ConfigError, match=r"replaced buffer 0\.total"):
        buffers.take_change()


def test_a_buffer_in_half_precision_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("scale", torch.ones(1, dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"buffer 0\.scale is torch\.float16"):
        RunningBuffers(model)
