"""Accuracy, counted in whole numbers, so that any sharing-out of the samples gives the same figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from lockstep.data.samples import Batch

# With more classes than this, the accuracy of each is not among the figures: they would drown the others.
MAX_CLASSES_TOLD = 50


class Accuracy:
    """How many samples got the right class, which classes are taken for which, and which samples went worst.

    Worst is what has the largest cross-entropy; one that is not finite counts as the largest.

    Args:
        num_classes: Number of classes.
        num_worst: How many of the samples with the largest loss are kept.
        num_top: Count too how many samples have their class among so many likeliest ones; no figure of it where there
            are no more classes than that.
        classes: The classes' names: each one's own accuracy is then a figure, if they are not too many.
    """

    def __init__(
        self, num_classes: int, num_worst: int = 25, *, num_top: int = 1, classes: Sequence[str] | None = None
    ) -> None:
        self._num_classes = num_classes
        self._num_worst = num_worst
        self._num_top = num_top if num_top < num_classes else 1
        self._classes = classes if classes is not None and num_classes <= MAX_CLASSES_TOLD else ()
        self._num_in_top = 0
        self._confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self._worst: list[tuple[float, int, int, int]] = []

    @property
    def num_samples(self) -> int:
        """How many samples were added, here or in what was merged."""
        return int(self._confusion.sum())

    def add(self, outputs: Any, batch: Batch) -> None:
        """Take in (N, num_classes) logits; the batch's targets are (N,) labels."""
        logits = outputs.detach().to("cpu", torch.float32)
        labels = batch.targets.to("cpu")
        chosen = logits.argmax(dim=1)
        cells = labels * self._num_classes + chosen
        # In place: with many classes, a table of this batch alone would be as large as that of all.
        self._confusion.view(-1).index_add_(0, cells, torch.ones_like(cells))
        if self._num_top > 1:
            # A class counts as likelier where its logit is larger, or equal and before it: as argmax has it.
            own = logits.gather(1, labels[:, None])
            is_before = torch.arange(self._num_classes) < labels[:, None]
            num_likelier = ((logits > own) | ((logits == own) & is_before)).sum(dim=1)
            # A logit that is not a number is neither larger nor smaller, and must not pass for the largest.
            self._num_in_top += int(((num_likelier < self._num_top) & torch.isfinite(own[:, 0])).sum())
        losses = F.cross_entropy(logits, labels, reduction="none").to(torch.float64)
        ranked = torch.where(torch.isfinite(losses), losses, math.inf)
        rows = zip(ranked.tolist(), batch.indices.tolist(), labels.tolist(), chosen.tolist(), strict=True)
        self._keep_worst(list(rows))

    def state(self) -> dict[str, Any]:
        """Counts: `confusion[label][answer]`, the samples with their class among the likeliest, the worst samples.

        A worst sample is `[loss, index, label, answer]`; its loss is infinite where it was not finite.
        """
        return {
            "confusion": self._confusion.tolist(),
            "in_top": self._num_in_top,
            "worst": [list(row) for row in self._worst],
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another rank has counted."""
        self._confusion += torch.tensor(state["confusion"], dtype=torch.int64)
        self._num_in_top += state["in_top"]
        self._keep_worst([(loss, index, label, answer) for loss, index, label, answer in state["worst"]])

    def result(self) -> dict[str, float]:
        """`top1`, the share of right answers; `top5` and the like; and `top1/NAME` for each class that has samples.

        Raises:
            ValueError: No sample was added.
        """
        if self.num_samples == 0:
            raise ValueError("no samples were added, so there is no accuracy")
        figures = {"top1": int(self._confusion.diagonal().sum()) / self.num_samples}
        if self._num_top > 1:
            figures[f"top{self._num_top}"] = self._num_in_top / self.num_samples
        totals, rights = self._confusion.sum(dim=1).tolist(), self._confusion.diagonal().tolist()
        for name, total, right in zip(self._classes, totals, rights, strict=bool(self._classes)):
            if total:
                figures[f"top1/{name}"] = right / total
        return figures

    def _keep_worst(self, rows: list[tuple[float, int, int, int]]) -> None:
        # The index decides between equal losses, so the choice does not depend on who saw which sample.
        self._worst = sorted(self._worst + rows, key=lambda row: (-row[0], row[1]))[: self._num_worst]
