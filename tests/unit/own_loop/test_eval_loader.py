"""Evaluation in a script's own loop: each sample once, sums and metrics of all of them."""

# ruff: noqa: PT012  # what raises is the body of a loop
from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import samebits
from samebits.errors import ConfigError
from tests.unit.own_loop.loops import data_loader, dataset


def test_each_sample_is_seen_once_and_sums_are_those_of_all() -> None:
    loader = samebits.EvalLoader(data_loader(15, batch_size=4))
    assert len(loader) == 4
    for x, y in loader:
        loader.add(count=len(x), total=y.sum())
        loader.add(count=0)
    sums = loader.sums()
    assert sums["count"] == 15
    assert sums["total"] == pytest.approx(dataset(15).tensors[1].double().sum().item(), abs=1e-6)


def test_a_sum_that_is_not_finite_is_nan() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    for _ in loader:
        loader.add(loss=math.inf)
    assert math.isnan(loader.sums()["loss"])


def test_an_evaluation_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    seen = [torch.rand(1) for _ in samebits.EvalLoader(data_loader(4))]
    assert torch.equal(torch.rand(1), expected)
    assert len(set(map(float, seen))) == 2


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.BatchNorm1d(4, affine=False)])
def test_a_batch_norm_in_training_mode_is_named(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Identity(), norm)
    batches: Any = iter(samebits.EvalLoader(data_loader(4)))
    x, _ = next(batches)
    with (
        pytest.warns(UserWarning, match="the model is in training mode while an EvalLoader is read"),
        contextlib.suppress(ValueError),  # SyncBatchNorm wants a GPU
    ):
        model(x)
    batches.close()


@pytest.mark.parametrize(
    "model",
    [
        nn.BatchNorm1d(4).eval(),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Sequential(nn.Dropout(), nn.Linear(4, 2)),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_model_that_counts_no_sample_is_not_named(model: nn.Module) -> None:
    loader = samebits.EvalLoader(data_loader(4))
    for x, _ in loader:
        loader.add(total=model(x).detach().sum())
    nn.BatchNorm1d(4)(torch.ones(3, 4))  # behind the pass


def test_numbers_outside_of_the_loop_are_refused() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    with pytest.raises(ConfigError, match=re.escape("add(), collect() and update() belong to the current batch")):
        loader.add(loss=1.0)


def test_a_loader_without_a_batch_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="no batch_size"):
        samebits.EvalLoader(DataLoader(dataset(4), batch_size=None))


def test_a_metric_that_does_not_merge_is_refused() -> None:
    loader = samebits.EvalLoader(data_loader(4))
    with pytest.raises(ConfigError, match="the metric list has no merge_state"):
        for _ in loader:
            loader.update([])


def test_metrics_of_torchmetrics_have_the_value_over_all_samples() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    data = data_loader(15, batch_size=4)
    loader = samebits.EvalLoader(data)
    error, values, average = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric(), torchmetrics.MeanMetric()
    for x, y in loader:
        loader.update(error, x[:, :1], y)
        loader.update(values, x)
        loader.update(average, x, weight=y.abs())
    x, y = dataset(15).tensors
    torch.testing.assert_close(loader.compute(error), (x[:, :1] - y).square().mean())
    assert torch.equal(loader.compute(values), x)
    torch.testing.assert_close(loader.compute(average), (x * y.abs()).sum() / (4 * y.abs().sum()))


def test_a_metric_whose_states_do_not_merge_is_refused() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    loader = samebits.EvalLoader(data_loader(4))

    class Whole(torchmetrics.MeanSquaredError):  # type: ignore[misc]
        full_state_update = True

    metric = Whole()
    with pytest.raises(ConfigError, match="Whole do not merge"):
        for x, y in loader:
            loader.update(metric, x[:, :1], y)
