"""Accuracy from integer counts, so that every distribution of the samples over ranks has the same result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits.data.samples import Batch
from samebits.metrics.worst import Worst

# Counts of predictions by class, exact in any distribution of the samples over ranks.
#
# Up to MAX_DENSE_CLASSES classes, a matrix has a count for each pair of classes. With more, a matrix would take
# gigabytes (21,841 classes: 3.8 GB on each rank), so only counts of each class are kept.


MAX_DENSE_CLASSES = 2_000  # a matrix of 32 MB


_BY_CLASS = ("samples", "correct", "predicted")


class Counts:
    """A count for each pair of label and prediction of C classes; of many classes, only those of `_BY_CLASS`."""

    def __init__(self, num_classes: int) -> None:
        self._is_dense = num_classes <= MAX_DENSE_CLASSES
        num_rows = num_classes if self._is_dense else len(_BY_CLASS)
        self._counts = torch.zeros(num_rows, num_classes, dtype=torch.int64)

    def add(self, labels: Tensor, predictions: Tensor) -> None:
        """Count (N,) labels with their (N,) predictions."""
        if self._is_dense:
            rows = [self._counts.view(-1)]
            places = [labels * len(self._counts) + predictions]
        else:
            rows = list(self._counts)
            places = [labels, labels[labels == predictions], predictions]
        for row, place in zip(rows, places, strict=True):
            # In place: with many classes, the matrix of a single batch would take as much memory again.
            row.index_add_(0, place, torch.ones_like(place))

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of samples, of correct predictions, and of all predictions of each class, (C,) each."""
        if not self._is_dense:
            return self._counts[0], self._counts[1], self._counts[2]
        return self._counts.sum(dim=1), self._counts.diagonal(), self._counts.sum(dim=0)

    def state(self) -> dict[str, Any]:
        """Return `confusion[label][prediction]`, or the counts of each class by name."""
        rows = self._counts.tolist()
        return {"confusion": rows} if self._is_dense else dict(zip(_BY_CLASS, rows, strict=True))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        rows = state["confusion"] if self._is_dense else [state[name] for name in _BY_CLASS]
        self._counts += torch.tensor(rows, dtype=torch.int64)


# Whether a classifier's answers have anything to do with its inputs.


_MIN_SAMPLES = 10
_ALL = 0.99
_STDS = 2.0


@dataclass(frozen=True)
class Guess:
    """Accuracy of answers that ignore the input, but have the same frequencies."""

    accuracy: float  #: Its expected value, from 0 to 1.
    std: float  #: Standard deviation of the accuracy over so many samples.


def guess(labels: Tensor, answers: Tensor) -> Guess:
    """Return the accuracy of answers that ignore the input; Cohen's kappa compares with the same value.

    Both arrays, (C,), count a class's samples and answers. Their sums are equal, and above 0.
    """
    num_samples = int(labels.sum())
    # Python's integers: the products of counts may exceed 64 bits.
    agreeing = sum(
        one * other for one, other in zip(labels.tolist(), answers.tolist(), strict=True)
    )
    accuracy = agreeing / num_samples**2
    return Guess(accuracy, math.sqrt(accuracy * (1 - accuracy) / num_samples))


def chance_level(labels: Tensor, answers: Tensor, num_correct: int) -> tuple[float, float] | None:
    """Return the accuracies of answers that ignore the input, if the accuracy is among them: two standard deviations.

    With so few samples that a perfect classifier could not be distinguished from these, it is None. Counts are (C,).
    """
    num_samples = int(labels.sum())
    if num_samples < _MIN_SAMPLES:
        return None
    chance = guess(labels, answers)
    low = max(chance.accuracy - _STDS * chance.std, 0.0)
    high = chance.accuracy + _STDS * chance.std
    return (low, high) if num_correct / num_samples <= high < 1 else None


def single_answer(labels: Tensor, answers: Tensor) -> int | None:
    """Return the class that takes all answers, or all but one in a hundred, where the samples have several classes.

    Both arrays, (C,), count a class's samples and answers.
    """
    num_samples = int(labels.sum())
    if num_samples < _MIN_SAMPLES:
        return None
    most = int(answers.argmax())
    is_one = int(answers[most]) >= _ALL * num_samples
    return most if is_one and int(labels[most]) < (2 * _ALL - 1) * num_samples else None


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
        self,
        num_classes: int,
        num_worst: int = 25,
        *,
        num_top: int = 1,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._num_classes = num_classes
        self._num_top = num_top if num_top < num_classes else 1
        self._classes = classes if classes is not None and num_classes <= MAX_NAMED_CLASSES else ()
        self._num_in_top = 0
        self._counts = Counts(num_classes)
        self._worst = Worst(num_worst)

    @property
    def num_samples(self) -> int:
        """Number of samples added, merged ones included."""
        return int(self._counts.totals()[0].sum())

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add (N, num_classes) logits. The batch's targets are (N,) labels."""
        logits = outputs.detach().to("cpu", torch.float32)
        labels = batch.targets.to("cpu")
        chosen = logits.argmax(dim=1)
        self._counts.add(labels, chosen)
        if self._num_top > 1:
            # A class ranks higher if its logit is larger, or equal with a smaller index: consistent with argmax.
            own = logits.gather(1, labels[:, None])
            is_before = torch.arange(self._num_classes) < labels[:, None]
            num_likelier = ((logits > own) | ((logits == own) & is_before)).sum(dim=1)
            # A nan logit compares false with all others, and would rank first.
            self._num_in_top += int(
                ((num_likelier < self._num_top) & torch.isfinite(own[:, 0])).sum()
            )
        losses = F.cross_entropy(logits, labels, reduction="none").to(torch.float64)
        ranked = torch.where(torch.isfinite(losses), losses, math.inf)
        columns = (ranked, batch.indices, labels, chosen)
        self._worst.add(zip(*(column.tolist() for column in columns), strict=True))

    def state(self) -> dict[str, Any]:
        """Return the counts: `confusion[label][prediction]`, `in_top`, and the worst samples.

        With more than 2,000 classes, `samples`, `correct` and `predicted` by class take the place of `confusion`.

        A worst sample is `[loss, index, label, prediction]`; its loss is infinite if it was not finite.
        """
        return {
            **self._counts.state(),
            "in_top": self._num_in_top,
            "worst": self._worst.rows,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._counts.merge(state)
        self._num_in_top += state["in_top"]
        self._worst.add(state["worst"])

    def result(self) -> dict[str, float]:
        """Return `top1`, `top5` (for num_top=5), and `top1/NAME` for each class with samples; each from 0 to 1.

        Raises:
            ValueError: No sample was added.
        """
        samples, correct, _ = self._counts.totals()
        num_samples = int(samples.sum())
        if num_samples == 0:
            raise ValueError("no samples were added, so there is no accuracy")
        # Python rounds the quotient of two integers once, so equal counts give an equal value.
        values = {"top1": int(correct.sum()) / num_samples}
        if self._num_top > 1:
            values[f"top{self._num_top}"] = self._num_in_top / num_samples
        totals = samples.tolist()
        rights = correct.tolist()
        for name, total, right in zip(self._classes, totals, rights, strict=bool(self._classes)):
            if total:
                values[f"top1/{name}"] = right / total
        return values

    def warnings(self) -> list[str]:
        """Return a sentence if one class takes all answers, or if the accuracy is at chance level."""
        labels, correct, answers = self._counts.totals()
        num_samples = int(labels.sum())
        num_correct = int(correct.sum())
        if num_samples == 0:
            return []
        one = single_answer(labels, answers)
        if one is not None:
            name = self._classes[one] if self._classes else f"class {one}"
            share = int(answers[one]) / num_samples
            own = int(labels[one]) / num_samples
            which = f"all {num_samples:,}" if share == 1 else f"{share:.2%} of the"
            return [f"{which} predictions are {name}, as {own:.2%} of the samples are"]
        chance = chance_level(labels, answers, num_correct)
        if chance is None:
            return []
        low, high = chance
        return [
            f"top-1 {num_correct / num_samples:.2%} is at chance level ({low:.2%} to {high:.2%})"
        ]
