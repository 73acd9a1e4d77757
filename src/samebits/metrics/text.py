"""Text recognition metrics from integer counts: every distribution of the samples over ranks has the same result."""

from collections.abc import Callable
from typing import Any

from samebits.data.samples import Batch
from samebits.extras import require
from samebits.metrics.worst import Worst


class TextMetric:
    """Line accuracy, character error rate, and the lines with the most errors.

    The character error rate is the Levenshtein distance over all lines, divided by the number of characters of the
    ground truth. It can be above 1.

    Args:
        read: Outputs of a batch -> its N predicted texts.
        truth: A batch -> its N ground-truth texts.
        num_worst: Number of lines with the most errors to keep.
    """

    def __init__(
        self,
        read: Callable[[Any], list[str]],
        truth: Callable[[Batch], list[str]],
        num_worst: int = 24,
    ) -> None:
        require("text", "TextMetric")
        self._read = read
        self._truth = truth
        self._num_edits = self._num_characters = self._num_right = 0
        self.num_samples = 0  #: Number of samples added, merged ones included.
        self._worst = Worst(num_worst)

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the model's outputs for one batch."""
        from rapidfuzz.distance import Levenshtein  # an optional package

        texts = self._read(outputs)
        truths = self._truth(batch)
        rows = []
        for text, truth, index in zip(texts, truths, batch.indices.tolist(), strict=True):
            num_edits = Levenshtein.distance(text, truth)
            self._num_edits += num_edits
            self._num_characters += len(truth)
            self._num_right += num_edits == 0
            self.num_samples += 1
            if num_edits:
                rows.append((num_edits, index, truth, text))
        self._worst.add(rows)

    def state(self) -> dict[str, Any]:
        """Return the counts, and the worst lines as `[edits, index, ground truth, prediction]`."""
        return {
            "edits": self._num_edits,
            "characters": self._num_characters,
            "right": self._num_right,
            "lines": self.num_samples,
            "worst": self._worst.rows,
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._num_edits += state["edits"]
        self._num_characters += state["characters"]
        self._num_right += state["right"]
        self.num_samples += state["lines"]
        self._worst.add(state["worst"])

    def result(self) -> dict[str, float]:
        """Return `line_accuracy` (share of lines without an error) and `cer`.

        Raises:
            ValueError: No line was added.
        """
        if self.num_samples == 0:
            raise ValueError("no lines were added, so there is no accuracy")
        return {
            "line_accuracy": self._num_right / self.num_samples,
            "cer": self._num_edits / max(1, self._num_characters),
        }

    def warnings(self) -> list[str]:
        """Return a sentence if nothing was read."""
        if not self.num_samples or self._num_right or self._num_edits < self._num_characters:
            return []
        return [
            f"nothing is read in {self.num_samples:,} lines: CTC first learns the blank, often for some epochs"
        ]
