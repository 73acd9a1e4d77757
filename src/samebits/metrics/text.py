"""Text recognition metrics from integer counts: every distribution of the samples over ranks has the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from samebits.data.samples import Batch
from samebits.extras import require


class TextMetric:
    """Line accuracy, character error rate, and the lines with the most errors.

    The character error rate is the Levenshtein distance over all lines, divided by the number of characters of the
    ground truth. It can be above 1.

    Args:
        read: Outputs of a batch -> its N predicted texts.
        truth: A batch -> its N ground-truth texts.
        group: A batch -> the group name of each line, to report the accuracy of each group.
        num_worst: Number of lines with the most errors to keep.
    """

    def __init__(
        self,
        read: Callable[[Any], list[str]],
        truth: Callable[[Batch], list[str]],
        group: Callable[[Batch], list[str]] | None = None,
        num_worst: int = 24,
    ) -> None:
        require("text", "TextMetric")
        self._read, self._truth, self._group = read, truth, group
        self._num_worst = num_worst
        self._num_edits = self._num_characters = 0
        self._groups: dict[str, list[int]] = {"": [0, 0]}
        self._worst: list[tuple[int, int, str, str]] = []

    @property
    def num_samples(self) -> int:
        """Number of lines added, merged ones included."""
        return self._groups[""][1]

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the model's outputs for one batch."""
        from rapidfuzz.distance import Levenshtein  # an optional package

        texts, truths = self._read(outputs), self._truth(batch)
        groups = [""] * len(truths) if self._group is None else self._group(batch)
        rows = []
        for text, truth, group, index in zip(texts, truths, groups, batch.indices.tolist(), strict=True):
            num_edits = Levenshtein.distance(text, truth)
            self._num_edits += num_edits
            self._num_characters += len(truth)
            for name in {"", group}:
                counts = self._groups.setdefault(name, [0, 0])
                counts[0] += num_edits == 0
                counts[1] += 1
            if num_edits:
                rows.append((num_edits, index, truth, text))
        self._keep_worst(rows)

    def state(self) -> dict[str, Any]:
        """Return the counts, and the worst lines as `[edits, index, ground truth, prediction]`."""
        return {
            "edits": self._num_edits,
            "characters": self._num_characters,
            "groups": {name: list(counts) for name, counts in self._groups.items()},
            "worst": [list(row) for row in self._worst],
        }

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""
        self._num_edits += state["edits"]
        self._num_characters += state["characters"]
        for name, (num_right, num_lines) in state["groups"].items():
            counts = self._groups.setdefault(name, [0, 0])
            counts[0] += num_right
            counts[1] += num_lines
        self._keep_worst([(edits, index, truth, text) for edits, index, truth, text in state["worst"]])

    def result(self) -> dict[str, float]:
        """Return `line_accuracy` (share of lines without an error), `cer`, and `GROUP_accuracy` for each group.

        Raises:
            ValueError: No line was added.
        """
        if self.num_samples == 0:
            raise ValueError("no lines were added, so there is no accuracy")
        shares = {name: num_right / num_lines for name, (num_right, num_lines) in sorted(self._groups.items())}
        values = {"line_accuracy": shares.pop(""), "cer": self._num_edits / max(1, self._num_characters)}
        return values | {f"{name}_accuracy": share for name, share in shares.items()}

    def _keep_worst(self, rows: list[tuple[int, int, str, str]]) -> None:
        # Ties are broken by index, so that the choice does not depend on the distribution over ranks.
        self._worst = sorted(self._worst + rows, key=lambda row: (-row[0], row[1]))[: self._num_worst]
