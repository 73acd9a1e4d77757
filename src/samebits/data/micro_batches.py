"""Number of micro-batches, and those of each rank. Imports no torch, so commands can use it before torch is loaded."""

from __future__ import annotations

from functools import lru_cache


def num_micro_batches(num_samples: int, micro_batch: int) -> int:
    """Return the fewest micro-batches of at most `micro_batch` samples that hold `num_samples`."""
    return -(-num_samples // micro_batch)


def part(start: int, stop: int, num_parts: int, index: int) -> tuple[int, int]:
    """Split [start, stop) into parts whose lengths differ by at most one, longer ones first, and return one of them.

    Args:
        start: First position.
        stop: The position after the last one.
        num_parts: Number of parts.
        index: The part to return, from 0.

    Returns:
        (first, stop) of the part.
    """
    size, longer = divmod(stop - start, num_parts)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


@lru_cache(16)  # the steps of a run differ in two sizes at most, and each asks for the shares of all ranks
def even_shares(num_micro_batches: int, world_size: int) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches [first, last) of each rank."""
    return tuple(part(0, num_micro_batches, world_size, rank) for rank in range(world_size))


class Alone:
    """The place of the only rank of a world of one, which has all micro-batches of a step."""

    rank, size = 0, 1
