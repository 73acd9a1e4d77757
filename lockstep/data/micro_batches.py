"""Number of micro-batches of a step. Imports nothing, so that commands can use it before torch is loaded."""

from __future__ import annotations


def num_micro_batches(num_samples: int, micro_batch: int) -> int:
    """Return the fewest micro-batches of at most `micro_batch` samples that hold `num_samples`."""
    return -(-num_samples // micro_batch)
