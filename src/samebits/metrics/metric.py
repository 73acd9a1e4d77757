"""The metric protocol: add outputs, merge the state of another rank, return values by name."""

from typing import Any, Protocol

from samebits.data.samples import Batch


class Metric(Protocol):
    """Counts over evaluated samples. `merge` must be exact: equal results however samples are split over ranks.

    A metric may also have `warnings() -> list[str]`: one sentence for each sign that the model learns nothing. The run
    prints them after the last validation, and once before it in the second half of the run.
    """

    @property
    def num_samples(self) -> int:
        """Number of samples added, merged ones included."""

    def add(self, outputs: Any, batch: Batch) -> None:
        """Add the model's outputs for one batch."""

    def state(self) -> dict[str, Any]:
        """Return the counts for `merge`, as plain numbers, strings, lists and dicts."""

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another rank, from its `state`."""

    def result(self) -> dict[str, float]:
        """Return the values by name."""
