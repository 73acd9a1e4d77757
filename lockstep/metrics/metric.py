"""What every metric can do: take outputs in, be merged with another rank's, and give figures out."""

from __future__ import annotations

from typing import Any, Protocol

from lockstep.data.samples import Batch


class Metric(Protocol):
    """Counts over evaluated samples. `merge` must be exact: the same figures however the samples were shared out."""

    @property
    def num_samples(self) -> int:
        """How many samples were added, here or in what was merged."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Take in the model's outputs for one batch."""

    def state(self) -> dict[str, Any]:
        """All that `merge` needs, as plain numbers, strings, lists and dicts."""

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another rank has counted."""

    def result(self) -> dict[str, float]:
        """The figures, by name."""
