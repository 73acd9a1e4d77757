"""Counts of predictions by class, exact in any distribution of the samples over ranks.

Up to MAX_DENSE_CLASSES classes, a matrix has a count for each pair of classes. With more, a matrix would take gigabytes
(21,841 classes: 3.8 GB on each rank), so counts are kept for each class, and for the pairs that occur:

    samples[label], correct[label]          one number each
    (label, prediction) -> count            only mistakes, and only up to MAX_PAIRS different ones; none above

The number of different pairs only grows when counts are merged, so whether they are left out does not depend on the
distribution either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]
MAX_DENSE_CLASSES = 2_000  # a matrix of 32 MB
MAX_PAIRS = 1_000_000  # 16 MB, and less than 30 MB as a message
_NUM_PENDING = 1 << 16


@dataclass(frozen=True)
class Counts:
    """Counts of an evaluation, from the state of a metric.

    Attributes:
        samples: (C,) number of samples of each class.
        correct: (C,) number of them that were predicted as their class.
        labels: (K,) labels of the pairs of classes that were confused, in ascending order.
        predictions: (K,) predictions of these pairs, in ascending order within a label.
        counts: (K,) number of samples of these pairs.
        has_pairs: Whether pairs were counted; otherwise there were too many, and K is 0.
    """

    samples: IntArray
    correct: IntArray
    labels: IntArray
    predictions: IntArray
    counts: IntArray
    has_pairs: bool = True

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Counts:
        """Return the counts in the state of `ConfusionMatrix` or `SparseConfusion`."""
        if "confusion" in state:
            matrix = np.array(state["confusion"], dtype=np.int64)
            correct = matrix.diagonal().copy()
            labels, predictions = np.nonzero(matrix - np.diag(correct))
            return cls(matrix.sum(1), correct, labels, predictions, matrix[labels, predictions])
        pairs = state["pairs"] or dict.fromkeys(_COLUMNS, ())
        samples, correct = (np.array(state[name], dtype=np.int64) for name in ("samples", "correct"))
        labels, predictions, counts = (np.array(pairs[name], dtype=np.int64) for name in _COLUMNS)
        return cls(samples, correct, labels, predictions, counts, state["pairs"] is not None)


_COLUMNS = ("labels", "predictions", "counts")


class ConfusionMatrix:
    """A count for each pair of classes.

    Args:
        num_classes: Number of classes, C.
    """

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

    def predictions(self) -> Tensor | None:
        """Return how often each class was predicted, (C,)."""
        return self._counts.sum(dim=0)

    def state(self) -> dict[str, Any]:
        """Return the counts as `confusion[label][prediction]`."""
        return {"confusion": self._counts.tolist()}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._counts += torch.tensor(state["confusion"], dtype=torch.int64)


class SparseConfusion:
    """Counts for each class, and for the pairs of classes that are confused.

    Args:
        num_classes: Number of classes, C.
    """

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._samples = torch.zeros(num_classes, dtype=torch.int64)
        self._correct = torch.zeros(num_classes, dtype=torch.int64)
        self._cells = torch.zeros(0, dtype=torch.int64)  # label * C + prediction, in ascending order
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0
        self._has_pairs = True

    def add(self, labels: Tensor, predictions: Tensor) -> None:
        """Count (N,) labels with their (N,) predictions."""
        is_correct = labels == predictions
        self._samples.index_add_(0, labels, torch.ones_like(labels))
        self._correct.index_add_(0, labels, is_correct.to(torch.int64))
        cells = (labels * self._num_classes + predictions)[~is_correct]
        self._add_pairs(cells, torch.ones_like(cells))

    def totals(self) -> tuple[Tensor, Tensor]:
        """Return the number of samples of each class, (C,), and of correct predictions, (C,)."""
        return self._samples, self._correct

    def predictions(self) -> Tensor | None:
        """Return how often each class was predicted, (C,); None if there were too many pairs to count them."""
        self._compact()
        if not self._has_pairs:
            return None
        return self._correct.index_add(0, self._cells % self._num_classes, self._counts)

    def state(self) -> dict[str, Any]:
        """Return `samples` and `correct` by class, and `pairs`: labels, predictions and counts; None if too many."""
        self._compact()
        pairs = None
        if self._has_pairs:
            columns = (self._cells // self._num_classes, self._cells % self._num_classes, self._counts)
            pairs = {name: column.tolist() for name, column in zip(_COLUMNS, columns, strict=True)}
        return {"samples": self._samples.tolist(), "correct": self._correct.tolist(), "pairs": pairs}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._samples += torch.tensor(state["samples"], dtype=torch.int64)
        self._correct += torch.tensor(state["correct"], dtype=torch.int64)
        if state["pairs"] is None:
            self._drop_pairs()
            return
        labels, predictions, counts = (torch.tensor(state["pairs"][name], dtype=torch.int64) for name in _COLUMNS)
        self._add_pairs(labels * self._num_classes + predictions, counts)

    def _add_pairs(self, cells: Tensor, counts: Tensor) -> None:
        if not self._has_pairs:
            return
        self._pending.append((cells, counts))
        self._num_pending += len(cells)
        # Sorting all pairs after each batch would cost more than the batch.
        if self._num_pending >= max(_NUM_PENDING, len(self._cells)):
            self._compact()

    def _compact(self) -> None:
        """Join equal pairs."""
        if not self._pending:
            return
        cells, places = torch.unique(
            torch.cat([self._cells, *(each for each, _ in self._pending)]), return_inverse=True
        )
        counts = torch.cat([self._counts, *(each for _, each in self._pending)])
        self._cells, self._counts = cells, torch.zeros_like(cells).index_add_(0, places, counts)
        self._pending, self._num_pending = [], 0
        if len(cells) > MAX_PAIRS:
            self._drop_pairs()

    def _drop_pairs(self) -> None:
        self._has_pairs = False
        self._cells, self._counts, self._pending = self._cells[:0].clone(), self._counts[:0].clone(), []
