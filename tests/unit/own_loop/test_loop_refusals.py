"""What cannot be exact in a script's loop is refused by name before the first step."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import samebits
from samebits.errors import ConfigError
from tests.unit.own_loop.loops import data_loader, dataset, network


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from range(8)


class Empty(Dataset[Any]):
    def __len__(self) -> int:
        return 0


class Twice(BatchSampler):
    pass


def make(model: Any = None, data: Any = None, optimizer: Any = None, **more: Any) -> None:
    model = network() if model is None else model
    optimizer = optimizer or torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    data = data_loader() if data is None else data
    samebits.exact(model, optimizer, data, **{"global_batch": 8, **more})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nn.DataParallel(network()), "wrapped by DataParallel"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)), "layer 1 is torch's SyncBatchNorm"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet"),
        (lambda: network().requires_grad_(False), "no parameter of the model requires a gradient"),
        (list, "there is no model"),
        (lambda: [lambda x: x], "the model is a function"),
    ],
)
def test_a_model_that_cannot_be_exact_is_refused(model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make(model())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (lambda: [1, 2], "data is a list"),
        (lambda: DataLoader(Stream(), batch_size=2), "Stream is a stream"),
        (lambda: DataLoader(Empty(), batch_size=2), "the dataset is empty"),
        (
            lambda: DataLoader(dataset(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 16, 16)),
            "the sampler WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(dataset(), batch_size=2, sampler=RandomSampler(dataset(), replacement=True)),
            "the sampler RandomSampler",
        ),
        (
            lambda: DataLoader(dataset(), batch_sampler=Twice(SequentialSampler(dataset()), 2, False)),
            "the sampler Twice",
        ),
        (lambda: DataLoader(dataset(), batch_size=None), "the DataLoader has no batch_size"),
    ],
)
def test_data_without_a_known_order_is_refused(data: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make(data=data())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 2.5}, "global_batch is 2.5"),
        ({"global_batch": "32"}, "Give a number: global_batch=32."),
        ({"micro_batch": "many"}, "Give a number: micro_batch=64."),
        ({"micro_batch": -1}, "micro_batch is -1"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"data": data_loader(4, drop_last=True)}, "no step: drop_last leaves out all 4 samples"),
        ({"per_step": [object()]}, "per_step has a object"),
    ],
)
def test_a_wrong_argument_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make(**more)


def test_an_optimizer_that_evaluates_the_loss_several_times_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match="LBFGS evaluates the loss several times"):
        make(model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_weights_of_16_bits_are_refused() -> None:
    model = network().bfloat16()
    with pytest.raises(ConfigError, match=re.escape("a parameter of shape (8, 4) is torch.bfloat16")):
        make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    model = network()
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with pytest.raises(ConfigError, match="is in two optimizers"):
        make(model, optimizer=both)
