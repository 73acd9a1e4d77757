"""A loop of one process, in small."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits
from samebits.own_loop.loader import ExactLoader


@contextmanager
def torch_settings() -> Iterator[None]:
    """Restore what `exact` sets for a process."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def dataset(num_samples: int = 16) -> TensorDataset:
    """Four numbers and their sum."""
    x = torch.linspace(-1, 1, num_samples * 4).view(num_samples, 4).sin()
    return TensorDataset(x, x.sum(1, keepdim=True))


def data_loader(num_samples: int = 16, **more: Any) -> DataLoader[Any]:
    return DataLoader(dataset(num_samples), **{"batch_size": 2, "shuffle": True, **more})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Loop:
    """A model, its optimizer and the loader of an exact loop: 4 micro-batches of 2 samples a step."""

    def __init__(self, model: nn.Module | None = None, data: DataLoader[Any] | None = None, **more: Any) -> None:
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader: ExactLoader
        settings = {"global_batch": 8, **more}
        _, _, self.loader = samebits.exact(
            self.model, self.optimizer, data_loader() if data is None else data, **settings
        )

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.model(x) - y).square().mean()

    def train(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(batch).backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for batch in self.loader:
            self.train(batch)

    def sha256(self) -> str:
        # Not of state_dict(), which is refused after a loop that was left inside a step.
        return samebits.weights_sha256(dict(self.model.named_parameters()))


def batches(loader: ExactLoader) -> Iterator[Any]:
    """Iterate over a loader as if each batch were trained on."""
    for batch in loader:
        loader.loop.habits.has_trained = True
        loader.loop.look()
        yield batch
