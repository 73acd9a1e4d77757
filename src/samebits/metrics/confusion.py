"""Counts of predictions by class, exact in any distribution of the samples over ranks.

Up to MAX_DENSE_CLASSES classes, a matrix has a count for each pair of classes. With more, a matrix would take gigabytes
(21,841 classes: 3.8 GB on each rank), so only counts of each class are kept.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_DENSE_CLASSES = 2_000  # a matrix of 32 MB


class ConfusionMatrix:
    """A count for each pair of C classes."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def add(self, labels: Tensor, predictions: Tensor) -> None:
        """Count (N,) labels with their (N,) predictions."""
        cells = labels * self._num_classes + predictions
        # In place: with many classes, the matrix of a single batch would take as much memory again.
        self._counts.view(-1).index_add_(0, cells, torch.ones_like(cells))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the number of samples of each class, (C,), and of correct predictions, (C,)."""
        return self._counts.sum(dim=1), self._counts.diagonal()

    def predictions(self) -> Tensor:
        """Return how often each class was predicted, (C,)."""
        return self._counts.sum(dim=0)

    def state(self) -> dict[str, Any]:
        """Return the counts as `confusion[label][prediction]`."""
        return {"confusion": self._counts.tolist()}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._counts += torch.tensor(state["confusion"], dtype=torch.int64)


class ClassCounts:
    """Counts for each of C classes, where a matrix would be too large."""

    def __init__(self, num_classes: int) -> None:
        self._counts = torch.zeros(3, num_classes, dtype=torch.int64)  # samples, correct, predicted

    def add(self, labels: Tensor, predictions: Tensor) -> None:
        """Count (N,) labels with their (N,) predictions."""
        for row, classes in enumerate((labels, labels[labels == predictions], predictions)):
            self._counts[row].index_add_(0, classes, torch.ones_like(classes))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the number of samples of each class, (C,), and of correct predictions, (C,)."""
        return self._counts[0], self._counts[1]

    def predictions(self) -> Tensor:
        """Return how often each class was predicted, (C,)."""
        return self._counts[2]

    def state(self) -> dict[str, Any]:
        """Return `samples`, `correct` and `predicted` by class."""
        return dict(zip(("samples", "correct", "predicted"), self._counts.tolist(), strict=True))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        rows = [state[name] for name in ("samples", "correct", "predicted")]
        self._counts += torch.tensor(rows, dtype=torch.int64)
