"""The samples of a validation that a model does worst on."""

from collections.abc import Iterable, Sequence
from typing import Any


class Worst:
    """The worst samples so far: rows of a score, the sample's index, and any plain values.

    Args:
        count: Number of rows to keep.
        sign: 1 if a larger score is worse, -1 if a smaller one is.
    """

    def __init__(self, count: int, sign: int = 1) -> None:
        self._count = count
        self._sign = sign
        self.rows: list[list[Any]] = []  #: The rows, the worst first.

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of further samples, or those of another rank."""
        # Ties are broken by index, so that the choice does not depend on the distribution over ranks.
        self.rows = sorted(
            [*self.rows, *map(list, rows)], key=lambda row: (-self._sign * row[0], row[1])
        )[: self._count]
