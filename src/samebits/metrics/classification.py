"""Accuracy from integer counts, so that every distribution of the samples over ranks has the same result."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from samebits.data.samples import Batch
from samebits.metrics import confusion
from samebits.metrics.confusion import ClassCounts, ConfusionMatrix
from samebits.metrics.guessing import guess, is_guessing, single_answer

# With more classes than this, per-class accuracies are left out of the result: they would hide the other values.
MAX_NAMED_CLASSES = 50


class Accuracy:
    """Top-1 and top-k accuracy, confusion matrix, and the samples with the largest loss.

    The loss is the cross-entropy; a loss that is not finite counts as the largest.

    Args:
        num_classes: Number of classes.
        num_worst: Number of samples with the largest loss to keep.
        num_top: The k of top-k accuracy. Left out of the result if there are no more classes than that.
        classes: Names of the classes, to report the accuracy of each of them if they are at most 50.
    """

    def __init__(
        self, num_classes: int, num_worst: int = 25, *, num_top: int = 1, classes: Sequence[str] | None = None
    ) -> None:
        self._num_classes = num_classes
        self._num_worst = num_worst
        self._num_top = num_top if num_top < num_classes else 1
        self._classes = classes if classes is not None and num_classes <= MAX_NAMED_CLASSES else ()
        self._num_in_top = 0
        is_dense = num_classes <= confusion.MAX_DENSE_CLASSES
        self._confusion = (ConfusionMatrix if is_dense else ClassCounts)(num_classes)
        self._worst: list[tuple[float, int, int, int]] = []

    @property
    def num_samples(self) -> int:
        """Number of samples added, merged ones included."""
        return int(self._confusion.totals()[0].sum())

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add (N, num_classes) logits. The batch's targets are (N,) labels."""
        logits = outputs.detach().to("cpu", torch.float32)
        labels = batch.targets.to("cpu")
        chosen = logits.argmax(dim=1)
        self._confusion.add(labels, chosen)
        if self._num_top > 1:
            # A class ranks higher if its logit is larger, or equal with a smaller index: consistent with argmax.
            own = logits.gather(1, labels[:, None])
            is_before = torch.arange(self._num_classes) < labels[:, None]
            num_likelier = ((logits > own) | ((logits == own) & is_before)).sum(dim=1)
            # A nan logit compares false with all others, and would rank first.
            self._num_in_top += int(((num_likelier < self._num_top) & torch.isfinite(own[:, 0])).sum())
        losses = F.cross_entropy(logits, labels, reduction="none").to(torch.float64)
        ranked = torch.where(torch.isfinite(losses), losses, math.inf)
        rows = zip(ranked.tolist(), batch.indices.tolist(), labels.tolist(), chosen.tolist(), strict=True)
        self._keep_worst(list(rows))

    def state(self) -> dict[str, Any]:
        """Return the counts: `confusion[label][prediction]`, `in_top`, and the worst samples.

        With more than 2,000 classes, `samples`, `correct` and `predicted` by class take the place of `confusion`.

        A worst sample is `[loss, index, label, prediction]`; its loss is infinite if it was not finite.
        """
        return {**self._confusion.state(), "in_top": self._num_in_top, "worst": [list(row) for row in self._worst]}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._confusion.merge(state)
        self._num_in_top += state["in_top"]
        self._keep_worst([(loss, index, label, prediction) for loss, index, label, prediction in state["worst"]])

    def result(self) -> dict[str, float]:
        """Return `top1`, `top5` (for num_top=5), and `top1/NAME` for each class with samples; each from 0 to 1.

        Raises:
            ValueError: No sample was added.
        """
        samples, correct = self._confusion.totals()
        num_samples = int(samples.sum())
        if num_samples == 0:
            raise ValueError("no samples were added, so there is no accuracy")
        # Python rounds the quotient of two integers once, so equal counts give an equal value.
        values = {"top1": int(correct.sum()) / num_samples}
        if self._num_top > 1:
            values[f"top{self._num_top}"] = self._num_in_top / num_samples
        totals, rights = samples.tolist(), correct.tolist()
        for name, total, right in zip(self._classes, totals, rights, strict=bool(self._classes)):
            if total:
                values[f"top1/{name}"] = right / total
        return values

    def warnings(self) -> list[str]:
        """Return a sentence if one class takes all answers, or if the accuracy is at chance level."""
        labels, correct = self._confusion.totals()
        answers = self._confusion.predictions()
        num_samples, num_correct = int(labels.sum()), int(correct.sum())
        if num_samples == 0:
            return []
        one = single_answer(labels, answers)
        if one is not None:
            name = self._classes[one] if self._classes else f"class {one}"
            share, own = int(answers[one]) / num_samples, int(labels[one]) / num_samples
            which = f"all {num_samples:,}" if share == 1 else f"{share:.2%} of the"
            return [f"{which} predictions are {name}, as {own:.2%} of the samples are"]
        if is_guessing(labels, answers, num_correct):
            chance = guess(labels, answers)
            low, high = max(chance.accuracy - 2 * chance.std, 0.0), chance.accuracy + 2 * chance.std
            return [f"top-1 {num_correct / num_samples:.2%} is at chance level ({low:.2%} to {high:.2%})"]
        return []

    def _keep_worst(self, rows: list[tuple[float, int, int, int]]) -> None:
        # Ties are broken by index, so that the choice does not depend on the distribution over ranks.
        self._worst = sorted(self._worst + rows, key=lambda row: (-row[0], row[1]))[: self._num_worst]
