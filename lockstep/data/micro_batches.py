"""Number of micro-batches, and a world of one rank. Imports nothing, so commands can use it before torch is loaded."""

from __future__ import annotations


def num_micro_batches(num_samples: int, micro_batch: int) -> int:
    """Return the fewest micro-batches of at most `micro_batch` samples that hold `num_samples`."""
    return -(-num_samples // micro_batch)


class Alone:
    """The place of the only rank of a world of one, which has all micro-batches of a step."""

    rank, size = 0, 1
